"""Terminal output: messages on standard error, results on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from .errors import OutputLost, failure_of

Colour = Literal["red", "green", "yellow", "blue"]

_STDERR: Final = 2
_CODES: dict[Colour, int] = {"red": 31, "green": 32, "yellow": 33, "blue": 34}


def fill_standard_descriptors() -> None:
    """Open the null device in place of standard streams that the parent process has closed.

    Otherwise an output file might be opened as standard error, and get the messages of libraries.
    Ours are discarded; commands that need standard input or output say that it is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end


def log(text: str) -> None:
    """Print a message on standard error; a closed standard error is ignored."""
    print_details(f"tidemill: {text}\n")


def print_details(text: str) -> None:
    """Print text unchanged on standard error; a closed standard error is ignored."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


@contextmanager
def failures_noted(words: str) -> Iterator[None]:
    """Log an exception of a step that does not affect rows, instead of raising it."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001 - rows must not depend on it
        log(f"note: {words} ({failure_of(exc)})")


def print_output(text: str) -> None:
    """Print lines on standard output; raises OutputLost when the reader is gone."""
    if sys.stdout is None:
        raise OutputLost("standard output is closed")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError as exc:
        raise OutputLost("standard output was closed by its reader") from exc
    except OSError as exc:
        raise OutputLost(f"standard output cannot be written ({exc.strerror})") from exc


def coloured(text: str, colour: Colour | None) -> str:
    """Return coloured text if standard output is a terminal with colours."""
    is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if colour is None or not is_wanted or not sys.stdout.isatty():
        return text
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"


def fit_words(words: Sequence[str], room: int, dropped_first: Sequence[str]) -> str:
    """Join words with commas within `room` columns; omits `dropped_first` as needed."""
    kept = list(words)
    for word in dropped_first:
        if len(", ".join(kept)) <= room:
            break
        if word in kept:
            kept.remove(word)
    return ", ".join(kept)[: max(0, room)]


def bar_width(columns: int) -> int:
    """Return the width of a progress bar in a terminal of this width."""
    return max(4, min(40, columns // 4))


def amount(count: int, singular: str, plural: str | None = None) -> str:
    """Return `1 row`, `2,000 rows`."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def size_words(num_bytes: int) -> str:
    """Return `16.1 GB`, or megabytes below a tenth of one."""
    if num_bytes >= 10**8:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Return `42 s`, `3 min 20 s` or `5 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def without_control_chars(text: str) -> str:
    """Replace unprintable characters, which could move the terminal's cursor."""
    return "".join(char if char.isprintable() else "�" for char in text)
