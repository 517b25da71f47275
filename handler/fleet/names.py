"""Names of workers for launchers that accept only short and simple names. No I/O."""

from __future__ import annotations

import re
from hashlib import blake2b

_FOREIGN = re.compile(r"[^A-Za-z0-9]+")
_NO_TAG = re.compile(r"[^\w .:/=+@-]")
_READABLE = 16
_MAX_TAG = 256


def plain_name(text: str) -> str:
    """Return a unique, readable name of letters, digits and hyphens for any text."""
    readable = _FOREIGN.sub("-", text)[:_READABLE].strip("-")
    return f"{readable}-{digest(text, 4)}" if readable else digest(text, 4)


def tag_value(text: str) -> str:
    """Return a text as a valid tag value."""
    return _NO_TAG.sub("-", text)[:_MAX_TAG]


def digest(text: str, size: int) -> str:
    """Return a text's digest of `size` bytes, in hexadecimal digits."""
    return blake2b(text.encode(), digest_size=size).hexdigest()
