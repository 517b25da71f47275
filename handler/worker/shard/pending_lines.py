"""Pending lines of a shard by their ranks, and the bisection of lines that kill an engine.

Suspects, the lines in flight when an engine died before, run first: one group at a time, with
nothing else in the engine. A group that runs to its end is cleared. One in which the engine dies
again is halved (bisected). A line that was its own group is quarantined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidemill.batch.file.lines import RawLine

from .line_order import Rank

Groups = tuple[tuple[int, ...], ...]


class Verdict(NamedTuple):
    """Suspect groups and quarantined lines of a shard after an engine's death."""

    suspects: Groups
    quarantined: tuple[int, ...] = ()


def halves(lines: Sequence[int]) -> Groups:
    """Return the lines as two groups, or as one when there is only one line."""
    middle = len(lines) // 2
    return tuple(tuple(half) for half in (lines[:middle], lines[middle:]) if half)


class PendingLines:
    """Hands out each line once, in stages: each group of suspects, then all other lines.

    A stage starts when every line of the one before is finished. The last one is by `ranks`, of all
    lines, where they are given.
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
        self._groups = deque(group for group in groups if group)
        self._rest = deque(rest.values())
        self._group: tuple[int, ...] = ()  # the lines of this stage if they are suspects
        self._queue: deque[RawLine] = deque()
        self._inflight: dict[int, RawLine] = {}
        self.has_begun = False

    @property
    def num_waiting(self) -> int:
        """Lines that were not handed out yet."""
        return len(self._queue) + sum(map(len, self._groups)) + len(self._rest)

    @property
    def next_rank(self) -> Rank:
        """Rank of the line that is handed out next where no suspects are."""
        return self._rank_of((self._queue or self._rest)[0])

    @property
    def num_inflight(self) -> int:
        """Lines that were handed out and are not finished."""
        return len(self._inflight)

    @property
    def is_finished(self) -> bool:
        """Say whether every line is finished."""
        return not self._inflight and not self.num_waiting

    @property
    def is_exclusive(self) -> bool:
        """Say whether suspects run next or now: nothing else may be in the engine then."""
        return bool(self._groups) or bool(self._group and (self._queue or self._inflight))

    @property
    def suspects(self) -> Groups:
        """Suspect groups that are not cleared; of the running one, the lines without a row."""
        unfinished = self._unfinished() if self._group else ()
        left = tuple(tuple(line.number for line in group) for group in self._groups)
        return (unfinished, *left) if unfinished else left

    def pop(self) -> RawLine | None:
        """Hand out the next line; None while nothing may be handed out."""
        if not self._queue and not self._inflight:
            self._start_stage()
        if not self._queue:
            return None
        line = self._queue.popleft()
        self._inflight[line.number] = line
        self.has_begun = True
        return line

    def finish(self, number: int) -> None:
        """Record that a line has its row."""
        del self._inflight[number]

    def judge(self) -> Verdict:
        """Return the verdict after the engine's death with the lines in flight."""
        if not self._inflight:
            return Verdict(self.suspects)
        if not self._group:
            return Verdict((tuple(sorted(self._inflight)),))
        left = self.suspects[1:]
        if len(self._group) == 1:
            return Verdict(left, self._group)
        return Verdict((*halves(self._unfinished()), *left))

    def _rank_of(self, line: RawLine) -> Rank:
        return self._ranks.get(line.number, ())

    def _start_stage(self) -> None:
        if self._groups:
            self._queue = deque(self._groups.popleft())
            self._group = tuple(line.number for line in self._queue)
        else:
            self._queue, self._rest = self._rest, self._queue
            self._group = ()

    def _unfinished(self) -> tuple[int, ...]:
        return tuple(sorted([*self._inflight, *(line.number for line in self._queue)]))
