"""Failures of a batch grouped by kind, for the dashboard's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.batch.file.error_kinds import ErrorCounter

_MAX_KINDS = 10
_MAX_PLACES = 10


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure as it is displayed; `place` is a line number or a request's ID.

    `status` is None for a line that was never run.
    """

    place: str
    code: str
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Row of the table: `count` failures that differ only in values, and their first places."""

    count: int
    first: Failure
    message: str
    places: str


def group_errors(failures: Iterable[Failure]) -> list[FailureKind]:
    """Return the most frequent kinds of failures, at most ten."""
    counter = ErrorCounter[Failure]()
    for failure in failures:
        counter.add(failure.message, failure, (failure.status, failure.code))
    return [
        FailureKind(kind.count, kind.first[0], kind.message, _places(kind.first))
        for kind in counter.most_frequent(_MAX_KINDS)
    ]


def _places(failures: Sequence[Failure]) -> str:
    named = [failure.place for failure in failures if failure.place]
    listed, num_more = ", ".join(named[:_MAX_PLACES]), len(named) - _MAX_PLACES
    return f"{listed} and {num_more:,} more" if num_more > 0 else listed
