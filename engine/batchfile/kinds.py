"""Which errors are of one kind, so that they are told once with how many there are."""

from __future__ import annotations

import re

_MAX_CHARS = 300
# Names of parameters and models make a kind; other quoted text and numbers do not.
_VALUE = re.compile(r"(`[^`]*`)|'[^']*'|\"[^\"]*\"|\d[\d,.]*\d|\d")


def kind_of(message: str) -> str:
    """Return what a message has in common with those that differ from it in values only."""
    return _VALUE.sub(lambda match: match[1] or "…", message[:_MAX_CHARS])
