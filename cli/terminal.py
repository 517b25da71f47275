"""What the command tells: the person on standard error, who reads its output on the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from cli.errors import OutputLost

Colour = Literal["red", "green", "yellow", "blue"]

_CODES: dict[Colour, int] = {"red": 31, "green": 32, "yellow": 33, "blue": 34}


def say(text: str) -> None:
    """Print one message; a closed standard error never stops a run."""
    try:
        sys.stderr.write(f"tidemill: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def put(text: str) -> None:
    """Print lines on standard output; raises OutputLost when nobody takes them."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError as exc:
        raise OutputLost("the reader of standard output went away") from exc
    except OSError as exc:
        raise OutputLost(f"standard output cannot be written ({exc.strerror})") from exc


def painted(text: str, colour: Colour | None) -> str:
    """Return text in a colour where standard output is a terminal that wants colours."""
    is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if colour is None or not is_wanted or not sys.stdout.isatty():
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def fitted(words: Sequence[str], room: int, dropped_first: Sequence[str]) -> str:
    """Return words with commas between: where there is no room, without those to be dropped."""
    kept = list(words)
    for word in dropped_first:
        if len(", ".join(kept)) <= room:
            break
        if word in kept:
            kept.remove(word)
    return ", ".join(kept)[: max(0, room)]


def bar_width(columns: int) -> int:
    """Return how much of a terminal's columns a bar of progress may take."""
    return max(4, min(40, columns // 4))


def amount(count: int, singular: str, plural: str | None = None) -> str:
    """Return `1 row`, `2,000 rows`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min 20 s` or `5 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plain(text: str) -> str:
    """Return what others have written without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else "�" for char in text)
