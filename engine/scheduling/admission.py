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


class PrefixOrder:
    """Those that begin alike one after another, so that they share pages while these are there.

    In rounds: all that wait when a round begins start in the order of their prompts, of equal ones
    the longest first. Who comes meanwhile waits for the next, so nobody is passed for longer than
    one round. A sequence that was given back starts before all of them.
    """

    def __init__(self) -> None:
        self._returned = ArrivalOrder()
        self._round: list[Sequence] = []  # the next to start last
        self._later: list[Sequence] = []

    def __len__(self) -> int:
        """Return how many sequences wait here."""
        return len(self._returned) + len(self._round) + len(self._later)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence for the round after this one."""
        self._later.append(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Queue a sequence before all that have not run yet."""
        self._returned.add(sequence)

    def first(self) -> Sequence | None:
        """Return the next of this round, and begin another one at its end."""
        if len(self._returned):
            return self._returned.first()
        if not self._round:
            self._round = sorted(self._later, key=_beginning, reverse=True)
            self._later = []
        return self._round[-1] if self._round else None

    def take(self) -> Sequence:
        """Remove what `first` returned, and return it."""
        return self._returned.take() if len(self._returned) else self._round.pop()

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Forget those of `unwanted` that wait here."""
        self._returned.remove(unwanted)
        self._round = [sequence for sequence in self._round if sequence not in unwanted]
        self._later = [sequence for sequence in self._later if sequence not in unwanted]


def _beginning(sequence: Sequence) -> tuple[str, bytes, int, int]:
    request = sequence.request
    return request.cache_salt, sequence.prompt.tobytes(), -request.max_tokens, sequence.arrival
