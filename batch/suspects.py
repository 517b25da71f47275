"""Suspects: requests that an engine had when it died, and the bisection of those that kill engines.

Suspects run separately: one group at a time, alone in their engine. A group that runs to its
end is cleared. If the engine dies again, the group is halved (bisected). A request alone in its
group is then quarantined. Workers, `tidemill run` and `tidemill serve` share this policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

KILLED_MESSAGE = "The engine crashed each time it ran this request, so it was not run again."

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]


class Verdict(NamedTuple):
    """Suspect groups and quarantined requests after an engine's death."""

    suspects: Groups
    quarantined: tuple[int, ...] = ()


def halves(requests: Sequence[T]) -> tuple[tuple[T, ...], ...]:
    """Split requests into two groups; a single request stays in one group."""
    middle = len(requests) // 2
    return tuple(tuple(half) for half in (requests[:middle], requests[middle:]) if half)


class Suspects:
    """Groups of suspects, by the numbers of their requests; at most one group is on trial.

    A group is on trial from its first `pop` until each of its requests is finished.
    """

    def __init__(self, groups: Iterable[Iterable[int]] = ()) -> None:
        each = map(tuple, groups)
        self._groups: deque[tuple[int, ...]] = deque(group for group in each if group)
        # The group on trial: its size, its waiting requests, and those in an engine.
        self._group_size = 0
        self._queue: deque[int] = deque()
        self._running: set[int] = set()

    @property
    def num_waiting(self) -> int:
        """Number of suspects that were not handed out yet."""
        return len(self._queue) + sum(map(len, self._groups))

    @property
    def num_running(self) -> int:
        """Number of suspects that were handed out and are not finished."""
        return len(self._running)

    @property
    def is_on_trial(self) -> bool:
        """Say whether a group is on trial."""
        return bool(self._queue or self._running)

    @property
    def has_waiting_group(self) -> bool:
        """Say whether a group may be put on trial now."""
        return bool(self._groups) and not self.is_on_trial

    @property
    def has_any(self) -> bool:
        """Say whether a group waits or is on trial."""
        return bool(self._groups) or self.is_on_trial

    @property
    def groups(self) -> Groups:
        """Groups that are not cleared; the one on trial has only its unfinished requests."""
        on_trial = (self._unfinished(),) if self.is_on_trial else ()
        return (*on_trial, *self._groups)

    def is_running(self, number: int) -> bool:
        """Say whether a request is on trial in an engine."""
        return number in self._running

    def pop(self) -> int | None:
        """Hand out the next suspect; None if the group on trial has no other waiting request."""
        if self.has_waiting_group:
            self._queue = deque(self._groups.popleft())
            self._group_size = len(self._queue)
        if not self._queue:
            return None
        number = self._queue.popleft()
        self._running.add(number)
        return number

    def finish(self, number: int) -> bool:
        """Record that a request is finished; return whether it was on trial."""
        is_known = number in self._running
        self._running.discard(number)
        return is_known

    def add(self, group: Iterable[int]) -> None:
        """Add a group that waits for its trial after all others."""
        if added := tuple(group):
            self._groups.append(added)

    def drop(self, number: int) -> None:
        """Remove a request whose group waits for its trial."""
        groups = (tuple(one for one in group if one != number) for group in self._groups)
        self._groups = deque(group for group in groups if group)

    def acquit(self) -> None:
        """Return the group on trial to the queue unchanged, if its machine caused the death."""
        group = self._unfinished()
        self._queue, self._running = deque(), set()
        if group:
            self._groups.appendleft(group)

    def judge(self, lost: Collection[int]) -> Verdict:
        """Return the verdict after the death of engines that had these requests."""
        groups, quarantined = self._judge(lost)
        if self.is_on_trial and not self._is_trial_of(lost):
            groups = [self._unfinished(), *groups]
        return Verdict(tuple(groups), quarantined)

    def convict(self, lost: Collection[int]) -> tuple[int, ...]:
        """Apply the verdict after such a death; return the quarantined requests."""
        groups, quarantined = self._judge(lost)
        if self._is_trial_of(lost):
            self._queue, self._running = deque(), set()
        self._groups = deque(groups)
        return quarantined

    def _judge(self, lost: Collection[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        """Return the groups that wait after a death, and the quarantined requests."""
        groups, quarantined = list(self._groups), tuple[int, ...]()
        if self._is_trial_of(lost):
            if self._group_size == 1:
                quarantined = self._unfinished()
            else:
                groups = [*halves(self._unfinished()), *groups]
        others = tuple(sorted(number for number in lost if number not in self._running))
        return [*groups, *([others] if others else [])], quarantined

    def _is_trial_of(self, lost: Collection[int]) -> bool:
        return any(number in self._running for number in lost)

    def _unfinished(self) -> tuple[int, ...]:
        """Return the unfinished requests of the group on trial."""
        return tuple(sorted([*self._running, *self._queue]))
