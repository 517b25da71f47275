"""What the command tells the person at the terminal; always on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one message; a closed standard error never stops a run."""
    try:
        sys.stderr.write(f"tidemill: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def amount(count: int, singular: str, plural: str | None = None) -> str:
    """Return `1 row`, `2,000 rows`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def plain(text: str) -> str:
    """Return what others have written without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "�" for char in text)
