"""Error summary: groups similar error messages and counts them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tidemill.batch.file.error_kinds import ErrorCounter, ErrorKind

from .terminal import without_control_chars

_MAX_KINDS = 100
_MAX_SHOWN = 10
_MAX_CHARS = 400


class ErrorSummary:
    """Counts errors by kind in bounded memory; messages that differ only in values are one kind."""

    def __init__(self) -> None:
        self._counter = ErrorCounter[int | None](_MAX_KINDS, max_first=1)

    @property
    def count(self) -> int:
        """Return the number of errors."""
        return self._counter.count

    def add(self, message: str, line: int | None = None) -> None:
        """Count an error; the lowest `line` number of each kind is kept."""
        message = message[:_MAX_CHARS]
        kind = self._counter.add(message, line)
        if line is not None and kind is not None and line < (kind.first[0] or 0):
            kind.first[0], kind.first_message = line, message

    def kinds(self) -> list[dict[str, Any]]:
        """Return the most frequent kinds: their message, count, and first line."""
        return [
            {
                "message": without_control_chars(kind.message),
                "count": kind.count,
                "first_line": kind.first[0],
            }
            for kind in self._counter.most_frequent(_MAX_SHOWN)
        ]

    def sentences(self, unit: str = "line") -> list[str]:
        """Return a sentence for each kind, the most frequent first: `  30 × `top_k` must be …`."""
        kinds = self._counter.most_frequent(_MAX_SHOWN)
        sentences = [f"  {kind.count:,} × {_described(kind, unit)}" for kind in kinds]
        others = self.count - sum(kind.count for kind in kinds)
        return [*sentences, *([f"  {others:,} × other errors"] if others else [])]


def _described(kind: ErrorKind[int | None], unit: str) -> str:
    message, line = without_control_chars(kind.message), kind.first[0]
    if line is None:
        return message
    return f"{message} ({'' if kind.count == 1 else 'first: '}{unit} {line:,})"


def sentences_by_line(errors: Iterable[tuple[int | None, str]], unit: str = "line") -> list[str]:
    """Return a sentence for each message with its line numbers, sorted by the first line."""
    numbers: dict[str, list[int]] = {}
    for number, message in sorted(errors, key=lambda error: error[0] or math.inf):
        numbers.setdefault(message, []).extend([] if number is None else [number])
    return [
        f"  {_numbered(without_control_chars(message), lines, unit)}"
        for message, lines in numbers.items()
    ]


def _numbered(message: str, lines: list[int], unit: str) -> str:
    if len(lines) < 2:
        return f"{unit} {lines[0]}: {message}" if lines else message
    return f"{len(lines)} × {message}: {unit}s {', '.join(_ranges(lines))}"


def _ranges(numbers: list[int]) -> list[str]:
    """Return ascending numbers, with runs of three or more as a range: `1–50`, `52`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ranges: list[str] = []
    for run in runs:
        ranges += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return ranges
