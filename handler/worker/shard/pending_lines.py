"""Pending lines of a shard by their ranks: suspects a group at a time, and all other lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from tidemill.batch.file.lines import RawLine
from tidemill.batch.suspects import Groups, Suspects, Verdict

from .line_order import Rank


class PendingLines:
    """Hands out each line once: the groups of suspects one after another, and all other lines.

    A group starts when every line of the previous one is finished. Other lines are ordered by
    `ranks`, which covers all lines, if given. An engine with suspects may have no other line: the
    caller requests one kind or the other.
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
        groups = [[number for number in group if number in rest] for group in suspects]
        self._suspects = Suspects(groups)
        self._suspected = {number: rest.pop(number) for group in groups for number in group}
        self._rest = deque(rest.values())
        self._inflight: dict[int, RawLine] = {}
        self.has_begun = False

    @property
    def num_waiting(self) -> int:
        """Number of lines that were not handed out yet."""
        return self._suspects.num_waiting + len(self._rest)

    @property
    def has_next(self) -> bool:
        """Return whether a line waits that is not a suspect."""
        return bool(self._rest)

    @property
    def next_rank(self) -> Rank:
        """Rank of the next line that is not a suspect."""
        return self._rank_of(self._rest[0])

    @property
    def num_inflight(self) -> int:
        """Number of lines that were handed out and are not finished."""
        return len(self._inflight) + self._suspects.num_running

    @property
    def is_finished(self) -> bool:
        """Return whether every line is finished."""
        return not self.num_inflight and not self.num_waiting

    @property
    def is_on_trial(self) -> bool:
        """Return whether a group of suspects runs now."""
        return self._suspects.is_on_trial

    @property
    def has_suspects(self) -> bool:
        """Return whether suspects run now or next: no other line may be in their engine then."""
        return self._suspects.has_any

    @property
    def has_waiting_group(self) -> bool:
        """Return whether a group of suspects may start now."""
        return self._suspects.has_waiting_group

    @property
    def suspects(self) -> Groups:
        """Suspect groups that are not cleared; of the running one, the lines without a row."""
        return self._suspects.groups

    def pop(self) -> RawLine | None:
        """Hand out the next line that is not a suspect, or None."""
        if not self._rest:
            return None
        line = self._rest.popleft()
        self._inflight[line.number] = line
        self.has_begun = True
        return line

    def pop_suspect(self) -> RawLine | None:
        """Hand out the next suspect; None if no other of its group waits."""
        number = self._suspects.pop()
        if number is None:
            return None
        self.has_begun = True
        return self._suspected[number]

    def finish(self, number: int) -> None:
        """Record that a line has its row."""
        if self._suspects.finish(number):
            del self._suspected[number]
        else:
            del self._inflight[number]

    def judge(self, lost: Collection[int]) -> Verdict:
        """Return the verdict after the death of engines that had these lines in flight."""
        return self._suspects.judge(self._handed_out(lost))

    def take_back(self, lost: Collection[int]) -> tuple[RawLine, ...]:
        """Make suspects of the lines that an engine had when it died; return the quarantined."""
        quarantined = self._suspects.convict(self._handed_out(lost))
        for number in lost:
            if (line := self._inflight.pop(number, None)) is not None:
                self._suspected[number] = line
        return tuple(self._suspected.pop(number) for number in quarantined)

    def _handed_out(self, numbers: Collection[int]) -> list[int]:
        """Return the lines among these that were handed out and are not finished."""
        return [one for one in numbers if one in self._inflight or self._suspects.is_running(one)]

    def _rank_of(self, line: RawLine) -> Rank:
        return self._ranks.get(line.number, ())
