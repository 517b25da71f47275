"""Which waiting sequence starts next: a policy of its own, behind a handful of verbs."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from typing import Protocol

from engine.scheduling.sequence import Sequence


class Admission(Protocol):
    """A queue of waiting sequences; its length is how many wait.

    Any order is safe: of those that run, the one that started first keeps its pages to its end.
    """

    def __len__(self) -> int:
        """Return how many sequences wait here."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""

    def give_back(self, sequence: Sequence) -> None:
        """Queue a sequence again that ran, and has lost its pages."""

    def first(self) -> Sequence | None:
        """Return the next to start, the same until the queue changes; None when nothing waits."""

    def take(self) -> Sequence:
        """Remove what `first` returned, which starts now, and return it."""

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Forget those of `unwanted` that wait here."""


class ArrivalOrder:
    """First come, first served; a sequence that was given back has its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        """Return how many sequences wait here."""
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all that arrived before it."""
        heappush(self._heap, (sequence.arrival, sequence))

    give_back = add

    def first(self) -> Sequence | None:
        """Return the one that arrived first."""
        return self._heap[0][1] if self._heap else None

    def take(self) -> Sequence:
        """Remove and return the one that arrived first."""
        return heappop(self._heap)[1]

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Forget those of `unwanted` that wait here."""
        self._heap = [entry for entry in self._heap if entry[1] not in unwanted]
        heapify(self._heap)
