"""What follows a step that failed: the same step again, its halves, and in the end a culprit.

A failed step costs no other request: it runs again as it was, then in halves, each of which brings
its sequences on. Nothing else is planned meanwhile. A sequence that fails twice with nothing beside
it is to blame, once the caller knows that the device is not. A step that does not fit into memory
is followed by smaller ones, for as long as needed. What a request is told is not said here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.attempts import HALF, Attempts, Reliability
from engine.scheduling.pictures import whole_stop
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_plan import StepPlan

logger = logging.getLogger(__name__)

# A failure may pass, or be the size of the batch; one that keeps coming has an owner.
MAX_FAILURES_IN_COMPANY = 3


class _Part(NamedTuple):
    """A step, or a half of one, that is to run again."""

    plan: StepPlan
    attempts: Attempts = Attempts()


class Failures:
    """Follows up the steps of one scheduler; of each step one of its methods hears."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._pool = scheduler.pool
        self._parts: deque[_Part] = deque()
        self._running: _Part | None = None
        self._halved_tokens = 0  # of the largest step that failed twice and has no culprit yet
        self._num_ownerless = 0  # such steps in a row of which each part went well
        self._reliability = Reliability()

    def next_part(self) -> StepPlan | None:
        """Return the step that must run before any other is planned, with nothing in flight.

        Raises `MachineFailed` where too many steps go well only when they are run again.
        """
        self._reliability.check()
        while self._parts:
            part = self._parts.popleft()
            plan = self._left_of(part.plan)
            if plan is not None:
                self._running = part._replace(plan=plan)
                return plan
        if self._halved_tokens:
            self._note_ownerless()
        return None

    def retry(self, plans: Collection[StepPlan]) -> Sequence | None:
        """Run a step that failed again, with those lost behind it: as it was, then halved.

        A sequence that failed alone twice is taken out for good and returned.
        """
        part, self._running = self._running, None
        if part is None:
            first, *others = plans
            self._parts += [_Part(first, Attempts(int(not others), has_failed=True))]
            self._parts += map(_Part, others)
            return None
        part = part._replace(attempts=part.attempts.failed())
        match part.attempts.next_for(len(part.plan.slots)):
            case "again":
                self._parts.appendleft(part)
                return None
            case "halves":
                self._halved_tokens = max(self._halved_tokens, part.plan.num_tokens)
                self._parts.extendleft(_Part(half, HALF) for half in reversed(_halves(part.plan)))
                return None
        self._halved_tokens = self._num_ownerless = 0
        culprit = self._scheduler.discard(int(part.plan.slots[0]))
        self._send_newcomers_back()
        return culprit

    def make_room(self, plans: Collection[StepPlan]) -> Sequence | None:
        """After a step that did not fit into memory, let fewer tokens and sequences run.

        `plans` are that step and those that were lost with it. A sequence of which not even one
        token fits when it runs alone, or not one image that must be computed whole, is taken out
        for good and returned; what others may hold is then again what it was before.
        """
        self._parts.clear()
        self._running, self._halved_tokens = None, 0
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

    def note_success(self) -> None:
        """Take note of a step that went well, which may have failed before."""
        self._scheduler.bound.note_fit()
        part, self._running = self._running, None
        self._reliability.note_good(None if part is None else part.attempts)

    def _left_of(self, plan: StepPlan) -> StepPlan | None:
        """Return a step without the sequences that left, or that are not where it begins."""
        is_left = self._is_ready(plan)
        if is_left.all():
            return plan
        is_decode = np.arange(len(plan.slots)) < plan.num_decodes
        if (
            ~is_left & (~is_decode | plan.starts_anew)
        ).any():  # others may share what it was to fill
            self._send_newcomers_back()
            is_left = self._is_ready(plan)
        return plan.only(is_left) if is_left.any() else None

    def _is_ready(self, plan: StepPlan) -> NDArray[np.bool_]:
        table, slots = self._table, plan.slots
        is_at_start: NDArray[np.bool_] = table.num_computed[slots] == plan.starts
        is_at_start &= table.is_running[slots]
        return is_at_start

    def _note_ownerless(self) -> None:
        """After a step that failed twice and of which each part went well: it may be its size."""
        self._num_ownerless += 1
        if self._num_ownerless == MAX_FAILURES_IN_COMPANY:
            self._scheduler.bound.lower(self._halved_tokens)
            logger.warning(
                "steps of %d tokens fail, and their parts do not: at most %d from now on",
                self._halved_tokens,
                self._scheduler.bound.tokens,
            )
            self._num_ownerless = 0
        self._halved_tokens = 0

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

    def _send_newcomers_back(self) -> None:
        """Let those that no step has held yet be placed anew: they may share what nobody fills."""
        newcomers = self._not_begun()
        self._scheduler.forget_from(
            newcomers, [int(self._table.num_computed[slot]) for slot in newcomers]
        )
        for slot in newcomers:
            self._scheduler.preempt(slot)

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


def _halves(plan: StepPlan) -> list[StepPlan]:
    """Return the halves of a step, in the order in which they must run.

    Where a sequence shares a page that another fills in the same step, its span starts behind the
    other's.
    """
    order = np.argsort(plan.starts, kind="stable")
    is_first = np.zeros(len(order), np.bool_)
    is_first[order[: len(order) // 2]] = True
    return [plan.only(is_first), plan.only(~is_first)]
