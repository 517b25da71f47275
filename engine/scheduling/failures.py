"""What follows a step that failed: who starts over, who runs alone, and who is to blame.

A failed step costs no other request: all sequences of the step start over, one alone at a time
until a step of its own went well, and only one that fails alone is to blame. A step that does not
fit into memory is followed by smaller ones, for as long as needed. What a request is told is not
said here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from engine.scheduling.pictures import whole_stop
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

# A failure may pass, or be the size of the batch; one that keeps coming has an owner.
MAX_FAILURES_IN_COMPANY = 3


class Failures:
    """Follows up the steps of one scheduler; of each step one of its methods hears."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._pool = scheduler.pool

    def start_over(self, plans: Collection[StepPlan]) -> Sequence | None:
        """Let the sequences of steps that failed, or were lost with one, start over, each alone.

        The one that was alone already, and accused before, is to blame: it is taken out for good
        and returned.
        """
        held = {slot for plan in plans for slot in plan.slots.tolist()}
        slots = [slot for slot in self._table.running.tolist() if slot in held]
        culprit = None
        if len(slots) == 1 and self._table.sequence(slots[0]).is_accused:
            culprit = self._scheduler.finish(slots.pop())
        for slot in slots:
            sequence = self._table.sequence(slot)
            sequence.is_suspect = sequence.is_accused = True
            sequence.num_failures += 1
            self._scheduler.preempt(slot)
        for slot in self._not_begun():
            self._scheduler.preempt(slot)
        self._pool.forget_all()  # last, for who leaves names pages
        return culprit

    def make_room(self, plans: Collection[StepPlan]) -> Sequence | None:
        """After a step that did not fit into memory, let fewer tokens and sequences run.

        `plans` are that step and those that were lost with it. A sequence of which not even one
        token fits when it runs alone, or not one image that must be computed whole, is taken out
        for good and returned; what others may hold is then again what it was before.
        """
        running = self._table.running.tolist()
        num_tokens = max(plan.num_tokens for plan in plans)
        if len(running) == 1 and not any(self._can_shrink(plan) for plan in plans):
            self._scheduler.bound.restore()
            culprit = self._scheduler.finish(running[0])
            self._pool.forget_all()
            return culprit
        self._scheduler.bound.lower(num_tokens)
        self._send_to_wait(
            {slot for plan in plans for slot in plan.slots[plan.starts_anew].tolist()}
            | self._not_begun()
        )
        self._pool.forget_all()
        logger.warning(
            "a step of %d tokens did not fit into memory: at most %d from now on",
            num_tokens,
            self._scheduler.bound.tokens,
        )
        return None

    def note_success(self, plan: StepPlan) -> None:
        """After a step that went well, called when the sequences that it finished are out.

        A suspect that ran alone runs with others again, unless it failed too often in company.
        """
        self._scheduler.bound.note_fit()
        if len(plan.slots) > 1:
            return
        (slot,) = plan.slots.tolist()
        if not self._table.is_running[slot] or not self._table.sequence(slot).is_suspect:
            return
        sequence = self._table.sequence(slot)
        if sequence.num_failures < MAX_FAILURES_IN_COMPANY:
            sequence.is_suspect = sequence.is_accused = False
            self._scheduler.preempt(slot)  # behind the suspects, who each run alone

    def _can_shrink(self, plan: StepPlan) -> bool:
        """Say whether a smaller step could have brought the plan's sequences on."""
        if len(plan.slots) > 1:
            return True
        slot, start = int(plan.slots[0]), int(plan.starts[0])
        is_here = self._table.is_running[slot]
        pictures = self._table.sequence(slot).request.pictures if is_here else ()
        return int(plan.stops[0]) > whole_stop(pictures, start, start + 1)

    def _not_begun(self) -> set[int]:
        """Return slots that no step has held yet: their shared pages may be of a lost one."""
        running = self._table.running
        return set(running[~self._table.has_begun[running]].tolist())

    def _send_to_wait(self, new: set[int]) -> None:
        """Let the newest half of the running sequences wait.

        So wait `new` ones, that started with the step, since their shared pages may never have been
        computed; the others lose nothing.
        """
        running = self._table.running.tolist()
        num_kept = max(1, min(len(running) // 2, self._scheduler.bound.tokens))
        for place, slot in enumerate(running):
            sequence = self._table.sequence(slot)
            if place >= num_kept:
                sequence.num_failures += 1
                sequence.is_suspect |= sequence.num_failures >= MAX_FAILURES_IN_COMPANY
            if place >= num_kept or slot in new:
                self._scheduler.preempt(slot)
