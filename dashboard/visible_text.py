"""Text of users without characters that are invisible or change its direction."""

from __future__ import annotations

import re
from typing import Final

# Control characters, those that change the direction of text, and unpaired surrogates.
_HIDDEN: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069"
    "\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Return a text with such characters as escapes, such as `\u202e`."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))
