"""Removes what is nobody else's business from AWS's answers: accounts, addresses, secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

# As AWS's own documents have it.
ACCOUNT: Final = "111122223333"
_REDACTED: Final = "REDACTED"
_PATTERNS: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Accounts of others, such as that of a machine's image.
        (r"(arn:aws[a-z-]*:[^:\s]*:[^:\s]*:)[0-9]{12}(?=:)", rf"\g<1>{ACCOUNT}"),
        (r"\b[0-9]{12}(?=\.dkr\.ecr\.)", ACCOUNT),
        # Access keys, keys of the API, and what a presigned URL is signed with.
        (r"\b(AKIA|ASIA)[A-Z0-9]{16}\b", _REDACTED),
        (r"\btm_[A-Za-z0-9_-]{8,}", _REDACTED),
        (r"(X-Amz-(?:Credential|Signature|Security-Token)=)[^&\s\"]+", rf"\g<1>{_REDACTED}"),
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "somebody@example.com"),
        # Addresses: IPv4, and IPv6 or those of interfaces.
        (r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])", "192.0.2.1"),
        (r"(?<![\w:])(?:[0-9a-f]{1,4}:+){4,7}[0-9a-f]{1,4}(?![\w:])", "2001:db8::1"),
    )
)
# Names of texts that are secrets, whatever they look like.
_SECRET_NAMES: Final = re.compile(r"secret|password|authorization|session_?token", re.IGNORECASE)


def redact(value: Any, account: str) -> Any:
    """Return a value as JSON holds it, without what names the account or lets anybody in."""
    match value:
        case Mapping():
            return {
                redact(name, account): _REDACTED
                if isinstance(held, str) and _SECRET_NAMES.search(name)
                else redact(held, account)
                for name, held in value.items()
            }
        case list() | tuple():
            return [redact(each, account) for each in value]
        case datetime():
            return value.isoformat()
        case str():
            text = value.replace(account, ACCOUNT)
            for pattern, replacement in _PATTERNS:
                text = pattern.sub(replacement, text)
            return text
        case _:
            return value
