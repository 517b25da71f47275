"""Errors of a batch, those of one kind told once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.batchfile.kinds import kind_of

_MAX_KINDS = 10
_MAX_PLACES = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """What is told of one failure; `place` is a line or the id of a request.

    `status` is None for a line that was never run.
    """

    place: str
    code: str
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures that differ in values only; `first` is the first of them."""

    failures: Sequence[Failure]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.failures)

    @property
    def first(self) -> Failure:
        """The first of them, which stands for all."""
        return self.failures[0]

    @property
    def message(self) -> str:
        """What went wrong, in the words of the first."""
        words = self.first.message
        is_one = all(failure.message == words for failure in self.failures)
        return words if is_one else f"{words.rstrip('.')}, and the like"

    @property
    def places(self) -> str:
        """Where they are; of many the first ones."""
        named = [failure.place for failure in self.failures if failure.place]
        shown, num_more = ", ".join(named[:_MAX_PLACES]), len(named) - _MAX_PLACES
        return f"{shown} and {num_more:,} more" if num_more > 0 else shown


def kinds_of(failures: Iterable[Failure]) -> list[Kind]:
    """Return the most frequent kinds of failures, ten at most."""
    found: dict[tuple[int | None, str, str], list[Failure]] = {}
    for failure in failures:
        key = failure.status, failure.code, kind_of(failure.message)
        found.setdefault(key, []).append(failure)
    return sorted(map(Kind, found.values()), key=lambda kind: -kind.count)[:_MAX_KINDS]
