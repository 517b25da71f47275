"""Pending lines of a shard by their ranks, and the bisection of lines that kill an engine.

Suspects, the lines in flight when an engine died before, run first: one group at a time, with
nothing else in their engine. A group that runs to its end is cleared. One in which the engine dies
again is halved (bisected). A line that was its own group is quarantined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from tidemill.batch.file.lines import RawLine

from .line_order import Rank

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]


class Verdict(NamedTuple):
    """Suspect groups and quarantined lines of a shard after an engine's death."""

    suspects: Groups
    quarantined: tuple[int, ...] = ()


def halves(lines: Sequence[T]) -> tuple[tuple[T, ...], ...]:
    """Return the lines as two groups, or as one when there is only one line."""
    middle = len(lines) // 2
    return tuple(tuple(half) for half in (lines[:middle], lines[middle:]) if half)


class PendingLines:
    """Hands out each line once: the groups of suspects one after another, and all other lines.

    A group starts when every line of the one before is finished. Other lines are by `ranks`, of all
    lines, where they are given. An engine that has suspects may have no other line: its owner asks
    for one kind or the other.
    """

    def __init__(
        self,
        lines: Sequence[RawLine],
        suspects: Iterable[Sequence[int]] = (),
        ranks: Sequence[Rank] = (),
    ) -> None:
        self._ranks = {line.number: rank for line, rank in zip(lines, ranks, strict=False)}
        in_order = sorted(lines, key=self._rank_of)
        rest = {line.number: line for line in in_order}
        groups = ([rest.pop(number) for number in group if number in rest] for group in suspects)
        self._groups: deque[Sequence[RawLine]] = deque(group for group in groups if group)
        self._rest = deque(rest.values())
        self._inflight: dict[int, RawLine] = {}
        # The group that runs: its size, and its lines that wait and that are in flight.
        self._group_size = 0
        self._queue: deque[RawLine] = deque()
        self._on_trial: dict[int, RawLine] = {}
        self.has_begun = False

    @property
    def num_waiting(self) -> int:
        """Lines that were not handed out yet."""
        return len(self._queue) + sum(map(len, self._groups)) + len(self._rest)

    @property
    def has_next(self) -> bool:
        """Say whether a line waits that is no suspect."""
        return bool(self._rest)

    @property
    def next_rank(self) -> Rank:
        """Rank of the next line that is no suspect."""
        return self._rank_of(self._rest[0])

    @property
    def num_inflight(self) -> int:
        """Lines that were handed out and are not finished."""
        return len(self._inflight) + len(self._on_trial)

    @property
    def is_finished(self) -> bool:
        """Say whether every line is finished."""
        return not self.num_inflight and not self.num_waiting

    @property
    def is_on_trial(self) -> bool:
        """Say whether a group of suspects runs now."""
        return bool(self._queue or self._on_trial)

    @property
    def has_suspects(self) -> bool:
        """Say whether suspects run next or now: nothing else may be in their engine then."""
        return bool(self._groups) or self.is_on_trial

    @property
    def has_waiting_group(self) -> bool:
        """Say whether a group of suspects may start now."""
        return bool(self._groups) and not self.is_on_trial

    @property
    def suspects(self) -> Groups:
        """Suspect groups that are not cleared; of the running one, the lines without a row."""
        unfinished = (_numbers(self._unfinished()),) if self.is_on_trial else ()
        return (*unfinished, *map(_numbers, self._groups))

    def pop(self) -> RawLine | None:
        """Hand out the next line that is no suspect; None where there is none."""
        if not self._rest:
            return None
        line = self._rest.popleft()
        self._inflight[line.number] = line
        self.has_begun = True
        return line

    def pop_suspect(self) -> RawLine | None:
        """Hand out the next suspect; None while no other of its group waits."""
        if not self.is_on_trial and self._groups:
            self._queue = deque(self._groups.popleft())
            self._group_size = len(self._queue)
        if not self._queue:
            return None
        line = self._queue.popleft()
        self._on_trial[line.number] = line
        self.has_begun = True
        return line

    def finish(self, number: int) -> None:
        """Record that a line has its row."""
        if self._on_trial.pop(number, None) is None:
            del self._inflight[number]

    def judge(self, lost: Collection[int]) -> Verdict:
        """Return the verdict after the death of engines that had these lines in flight."""
        groups, quarantined = self._judge(lost)
        if self.is_on_trial and not self._is_trial_of(lost):
            groups = [self._unfinished(), *groups]
        return Verdict(tuple(map(_numbers, groups)), _numbers(quarantined))

    def take_back(self, lost: Collection[int]) -> tuple[RawLine, ...]:
        """Make suspects of the lines that an engine had when it died; return the quarantined."""
        groups, quarantined = self._judge(lost)
        if self._is_trial_of(lost):
            self._queue, self._on_trial = deque(), {}
        self._groups = deque(groups)
        for number in lost:
            self._inflight.pop(number, None)
        return tuple(quarantined)

    def _judge(
        self, lost: Collection[int]
    ) -> tuple[Sequence[Sequence[RawLine]], Sequence[RawLine]]:
        """Return the suspect groups that wait after a death, and the quarantined lines."""
        groups, quarantined = list(self._groups), list[RawLine]()
        if self._is_trial_of(lost):
            if self._group_size == 1:
                quarantined = self._unfinished()
            else:
                groups = [*halves(self._unfinished()), *groups]
        others = sorted(self._inflight.keys() & lost)
        if others:
            groups.append([self._inflight[number] for number in others])
        return groups, quarantined

    def _is_trial_of(self, lost: Collection[int]) -> bool:
        return any(number in self._on_trial for number in lost)

    def _rank_of(self, line: RawLine) -> Rank:
        return self._ranks.get(line.number, ())

    def _unfinished(self) -> list[RawLine]:
        """Return the lines of the running group that have no row."""
        return sorted([*self._on_trial.values(), *self._queue], key=lambda line: line.number)


def _numbers(lines: Iterable[RawLine]) -> tuple[int, ...]:
    return tuple(line.number for line in lines)
