"""Errors of one kind told once, with how many there are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cli.terminal import plain
from engine.batchfile.kinds import kind_of

_MAX_KINDS = 100
_MAX_SHOWN = 10
_MAX_CHARS = 300


@dataclass(slots=True)
class _Kind:
    message: str
    first: int | None
    count: int = 0
    is_one_message: bool = True


class Kinds:
    """Counts errors by their messages: those that differ in values only are of one kind.

    Memory is bounded, however many there are.
    """

    def __init__(self) -> None:
        self.count = 0
        self._kinds: dict[str, _Kind] = {}
        self._num_others = 0

    def add(self, message: str, line: int | None = None) -> None:
        """Count one more; `line` is where it is, as the file counts."""
        self.count += 1
        message = message[:_MAX_CHARS]
        key = kind_of(message)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) == _MAX_KINDS:
                self._num_others += 1
                return
            kind = self._kinds[key] = _Kind(message, line)
        kind.count += 1
        kind.is_one_message &= message == kind.message

    def told(self, unit: str = "line") -> list[str]:
        """Return a sentence for each kind, the most frequent first: `  30 × `top_k` must be …`."""
        kinds = sorted(self._kinds.values(), key=lambda kind: -kind.count)
        sentences = [f"  {kind.count:,} × {_described(kind, unit)}" for kind in kinds[:_MAX_SHOWN]]
        others = self._num_others + sum(kind.count for kind in kinds[_MAX_SHOWN:])
        return [*sentences, *([f"  {others:,} × other errors"] if others else [])]


def _described(kind: _Kind, unit: str) -> str:
    message = plain(kind.message)
    if not kind.is_one_message:
        message = f"{message.rstrip('.')}, and the like"
    if kind.first is None:
        return message
    return f"{message} ({'' if kind.count == 1 else 'first: '}{unit} {kind.first:,})"


def told_by_line(errors: Iterable[tuple[int | None, str]], unit: str = "line") -> list[str]:
    """Return a sentence for each message, with the number of every line that it is about."""
    numbers: dict[str, list[int]] = {}
    for number, message in errors:
        numbers.setdefault(message, []).extend([] if number is None else [number])
    return [f"  {_numbered(plain(message), lines, unit)}" for message, lines in numbers.items()]


def _numbered(message: str, lines: list[int], unit: str) -> str:
    if len(lines) < 2:
        return f"{unit} {lines[0]}: {message}" if lines else message
    return f"{len(lines)} × {message}: {unit}s {', '.join(_ranges(lines))}"


def _ranges(numbers: list[int]) -> list[str]:
    """Return ascending numbers with three or more in a row as a range: `1–50`, `52`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown: list[str] = []
    for run in runs:
        shown += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return shown
