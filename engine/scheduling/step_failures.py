"""Failed steps: retries the step, then its halves, until one sequence is to blame.

A failed step costs no other request: it runs again unchanged, then in halves, each of which
advances its sequences. In the meantime nothing else is planned. A sequence that fails twice when it
runs alone is to blame, once the caller knows that the device is not. A step that does not fit into
memory is followed by smaller ones, as long as needed. Error messages are composed elsewhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MachineFailed
from .images import whole_stop
from .scheduler import MAX_FAILURES_IN_COMPANY, Scheduler
from .sequence import Sequence
from .step_plan import StepPlan

logger = logging.getLogger(__name__)

# This number of temporary failures within this number of steps means a faulty device.
MAX_PASSING_FAILURES = 8
PASSING_WINDOW_STEPS = 64


@dataclass(frozen=True, slots=True)
class Attempts:
    """Failures of one step so far; `is_half` is True for a half of a failed step.

    `num_failures` counts failures in a row with no other step in between: if every second run
    fails, regardless of its contents, no request must be blamed.
    """

    num_failures: int = 0
    has_failed: bool = False
    is_half: bool = False

    def failed(self) -> Attempts:
        """Return the attempts with one more failure."""
        return replace(self, num_failures=self.num_failures + 1, has_failed=True)

    def next_for(self, num_requests: int) -> Literal["again", "halves", "blame"]:
        """Return the next action for a step with `num_requests` requests."""
        if num_requests > 1:
            return "halves" if self.is_half or self.num_failures > 1 else "again"
        return "blame" if self.num_failures > 1 else "again"


HALF, NO_ATTEMPTS = Attempts(is_half=True), Attempts()


class Reliability:
    """Judges a device by its temporary failures: single ones are harmless, many are a verdict."""

    def __init__(self) -> None:
        self.num_good = 0
        self._passed_at: deque[int] = deque(maxlen=MAX_PASSING_FAILURES)  # as counts of good steps

    def note_good(self, attempts: Attempts | None = None) -> None:
        """Count a successful step, given its earlier attempts."""
        self.num_good += 1
        if attempts is not None and attempts.has_failed:
            self._passed_at.append(self.num_good)

    def check(self) -> None:
        """Raise `MachineFailed` after too many temporary failures: results may be wrong as well."""
        passed = self._passed_at
        if len(passed) < MAX_PASSING_FAILURES or passed[-1] - passed[0] >= PASSING_WINDOW_STEPS:
            return
        raise MachineFailed(
            f"the device is unreliable: {MAX_PASSING_FAILURES} steps failed within "
            f"{PASSING_WINDOW_STEPS}, and succeeded when they were run again"
        )


class _Part(NamedTuple):
    """A step, or half of one, that must run again."""

    plan: StepPlan
    attempts: Attempts = Attempts()


class StepFailures:
    """Follows up the failed steps of one scheduler.

    While it `is_open`, parts of a failed step are left, and it is notified of each step; otherwise
    successful steps are only counted in its `reliability`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._pool = scheduler.pool
        self._parts: deque[_Part] = deque()
        self._running: _Part | None = None
        self._halved_tokens = 0  # of the largest step that failed twice and has no culprit yet
        self._num_ownerless = 0  # such steps in a row whose parts all succeeded
        self.reliability = Reliability()
        self.is_open = False

    def next_part(self) -> StepPlan | None:
        """Return the step that must run before any other is planned, with nothing in flight.

        Raises `MachineFailed` if too many steps succeed only when they are run again.
        """
        self.reliability.check()
        while self._parts:
            part = self._parts.popleft()
            if (rebuild := self._scheduler.plan_rebuild(part.plan)) is not None:
                self._parts.appendleft(part)
                self._running = _Part(rebuild)
                return rebuild
            plan = self._left_of(part.plan)
            if plan is not None:
                self._running = part._replace(plan=plan)
                return plan
        if self._halved_tokens:
            self._note_ownerless()
        self.is_open = self._running is not None
        return None

    def retry(self, plans: Collection[StepPlan]) -> Sequence | None:
        """Run a failed step again, with those lost after it: unchanged at first, then in halves.

        A sequence that failed twice alone is removed permanently and returned.
        """
        self.is_open = True
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
        """After a step that did not fit into memory, allow fewer tokens and sequences.

        `plans` are that step and those that were lost with it. A sequence of which not even one
        token, or one indivisible image, fits alone is removed permanently and returned; the limits
        of others are then restored.
        """
        self._parts.clear()
        self._running, self._halved_tokens = None, 0
        running = self._table.running.tolist()
        num_tokens = max(plan.num_tokens for plan in plans)
        if len(running) == 1 and not any(self._can_shrink(plan) for plan in plans):
            self._scheduler.step_limit.restore()
            culprit = self._scheduler.finish(running[0])
            self._pool.invalidate_all()
            return culprit
        self._scheduler.step_limit.lower(num_tokens)
        self._send_to_wait(
            {slot for plan in plans for slot in plan.slots[plan.starts_fresh].tolist()}
            | self._not_begun()
        )
        self._pool.invalidate_all()
        logger.warning(
            "a step of %d tokens did not fit into memory: the limit is %d from now on",
            num_tokens,
            self._scheduler.step_limit.tokens,
        )
        return None

    def note_success(self) -> None:
        """Record a successful step, which may have failed before."""
        part, self._running = self._running, None
        self.reliability.note_good(None if part is None else part.attempts)

    def _left_of(self, plan: StepPlan) -> StepPlan | None:
        """Return a step without sequences that have left or are not at its start."""
        is_left = self._is_ready(plan)
        if is_left.all():
            return plan
        is_decode = np.arange(len(plan.slots)) < plan.num_decodes
        # Others may share the pages that a removed sequence was to fill.
        if (~is_left & (~is_decode | plan.starts_fresh)).any():
            self._send_newcomers_back()
            is_left = self._is_ready(plan)
        return plan.only(is_left) if is_left.any() else None

    def _is_ready(self, plan: StepPlan) -> NDArray[np.bool_]:
        table, slots = self._table, plan.slots
        is_at_start: NDArray[np.bool_] = table.num_computed[slots] == plan.starts
        is_at_start &= table.is_running[slots]
        return is_at_start

    def _note_ownerless(self) -> None:
        """Count a step that failed twice though each part succeeded: its size may be the cause."""
        self._num_ownerless += 1
        if self._num_ownerless == MAX_FAILURES_IN_COMPANY:
            self._scheduler.step_limit.lower(self._halved_tokens)
            logger.warning(
                "steps of %d tokens fail, but their parts do not: the limit is %d from now on",
                self._halved_tokens,
                self._scheduler.step_limit.tokens,
            )
            self._num_ownerless = 0
        self._halved_tokens = 0

    def _can_shrink(self, plan: StepPlan) -> bool:
        """Return whether a smaller step could have advanced the plan's sequences."""
        if len(plan.slots) > 1:
            return True
        slot, start = int(plan.slots[0]), int(plan.starts[0])
        is_here = self._table.is_running[slot]
        images = self._table.sequence(slot).request.images if is_here else ()
        return int(plan.stops[0]) > whole_stop(images, start, start + 1)

    def _not_begun(self) -> set[int]:
        """Return slots that no step has included yet: their shared pages may be of a lost step."""
        running = self._table.running
        return set(running[~self._table.has_begun[running]].tolist())

    def _send_newcomers_back(self) -> None:
        """Preempt sequences that no step has included yet: they may share unfilled pages."""
        newcomers = self._not_begun()
        self._scheduler.invalidate_from(
            newcomers, [int(self._table.num_computed[slot]) for slot in newcomers]
        )
        for slot in newcomers:
            self._scheduler.preempt(slot)

    def _send_to_wait(self, new: set[int]) -> None:
        """Preempt the newest half of the running sequences.

        The `new` ones, which started with the step, are preempted too, since their shared pages may
        never have been computed; the others lose nothing.
        """
        running = self._table.running.tolist()
        num_retained = max(1, min(len(running) // 2, self._scheduler.step_limit.tokens))
        for place, slot in enumerate(running):
            sequence = self._table.sequence(slot)
            if place >= num_retained:
                sequence.num_failures += 1
                sequence.is_suspect |= sequence.num_failures >= MAX_FAILURES_IN_COMPANY
            if place >= num_retained or slot in new:
                self._scheduler.preempt(slot)


def _halves(plan: StepPlan) -> list[StepPlan]:
    """Return the halves of a step, in the order in which they must run.

    If a sequence shares a page that another fills in the same step, its span starts after the
    other's.
    """
    order = np.argsort(plan.starts, kind="stable")
    is_first = np.zeros(len(order), np.bool_)
    is_first[order[: len(order) // 2]] = True
    return [plan.only(is_first), plan.only(~is_first)]
