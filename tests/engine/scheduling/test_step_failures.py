"""After a step failed: which sequences restart, which run alone, and which one is to blame."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.engine.errors import DeviceFailed
from tidemill.engine.scheduling.admission import ArrivalOrder, UrgentFirst
from tidemill.engine.scheduling.scheduler import Scheduler
from tidemill.engine.scheduling.sequence import Sequence, SequenceRequest
from tidemill.engine.scheduling.step_failures import (
    MAX_FAILURES_IN_COMPANY,
    MAX_PASSING_FAILURES,
    PASSING_WINDOW_STEPS,
    StepFailures,
)
from tidemill.engine.scheduling.step_plan import StepPlan
from tidemill.engine.scheduling.table import SequenceTable
from tidemill.engine.state.pages import PagePool

BUDGET = 32


class Ward:
    """Sequences of two tokens each, and the handling of failed steps."""

    def __init__(self, num_sequences: int) -> None:
        self.scheduler = Scheduler(SequenceTable(8, 64, 4), PagePool(64), ArrivalOrder(), BUDGET)
        self.failures = StepFailures(self.scheduler)
        self.sequences = [
            Sequence(SequenceRequest([number, 7], 60), number) for number in range(num_sequences)
        ]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    def plan(self) -> StepPlan:
        """Return the next step, which must exist."""
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def of(self, plan: StepPlan) -> list[Sequence]:
        """Return the sequences of a step."""
        return [self.scheduler.table.sequence(slot) for slot in plan.slots.tolist()]

    def succeed(self, plan: StepPlan) -> None:
        """Let a step succeed; no sequence ends."""
        ids = np.ones(len(plan.sampled), np.int64)
        self.scheduler.launch(plan)
        self.scheduler.collect(plan, ids, np.ones(len(ids), np.bool_))
        self.failures.note_success()

    def fail(self) -> Sequence | None:
        """Let the next step fail."""
        return self.failures.retry([self.part()])

    def part(self) -> StepPlan:
        """Return the step that must run before any other."""
        part = self.failures.next_part()
        assert part is not None
        return part

    def sizes(self) -> list[int]:
        """Let all parts of a step succeed and return how many sequences each has."""
        sizes = []
        while (part := self.failures.next_part()) is not None:
            sizes.append(len(part.slots))
            self.succeed(part)
        return sizes


def test_a_failed_step_runs_again_unchanged() -> None:
    """After a transient failure, no sequence restarts from the beginning."""
    ward = Ward(3)
    plan = ward.plan()
    assert ward.failures.retry([plan]) is None
    assert ward.part() is plan
    ward.succeed(plan)
    assert ward.failures.next_part() is None
    assert not any(sequence.num_preemptions for sequence in ward.sequences)


def test_a_repeated_failure_is_bisected_to_one_sequence() -> None:
    """The halves without that sequence succeed, and no other sequence restarts."""
    ward = Ward(8)
    culprit = ward.sequences[6]
    ward.succeed(ward.plan())
    ward.failures.retry([ward.plan()])
    sizes, blamed = [], None
    while (part := ward.failures.next_part()) is not None:
        sizes.append(len(part.slots))
        if culprit in ward.of(part):
            blamed = ward.failures.retry([part]) or blamed
        else:
            ward.succeed(part)
    assert blamed is culprit
    assert sizes == [8, 4, 4, 2, 2, 1, 1, 1]
    assert not any(sequence.num_preemptions for sequence in ward.sequences)


def test_two_faulty_sequences_are_both_found() -> None:
    """The second one is found in the rest of the same step."""
    ward = Ward(4)
    culprits = [ward.sequences[0], ward.sequences[3]]
    ward.succeed(ward.plan())
    ward.failures.retry([ward.plan()])
    blamed = []
    while (part := ward.failures.next_part()) is not None:
        if any(one in culprits for one in ward.of(part)):
            blamed.append(ward.failures.retry([part]))
        else:
            ward.succeed(part)
    assert [one for one in blamed if one is not None] == culprits


def test_an_aborted_sequence_does_not_run_again() -> None:
    """None of its pages stay held."""
    ward = Ward(3)
    ward.succeed(ward.plan())
    ward.failures.retry([ward.plan()])
    ward.scheduler.drop({ward.sequences[1]})
    assert ward.of(ward.part()) == [ward.sequences[0], ward.sequences[2]]


def test_a_step_that_fails_only_because_of_its_size_is_followed_by_smaller_ones() -> None:
    """Its halves succeed each time; after the third time, steps stay smaller."""
    ward = Ward(8)
    for _ in range(MAX_FAILURES_IN_COMPANY):
        assert ward.scheduler.step_limit.tokens == BUDGET
        plan = ward.plan()
        ward.failures.retry([plan])
        ward.fail()
        assert ward.sizes() == [4, 4]
    assert ward.scheduler.step_limit.tokens == plan.num_tokens // 2


def test_a_device_with_many_transient_failures_is_unreliable() -> None:
    """Every second step fails: no sequence is to blame, and the results cannot be trusted."""
    ward = Ward(2)
    for _ in range(MAX_PASSING_FAILURES):
        assert ward.failures.next_part() is None
        ward.failures.retry([ward.plan()])
        ward.succeed(ward.part())
    with pytest.raises(DeviceFailed, match="is unreliable"):
        ward.failures.next_part()


def test_occasional_transient_failures_are_tolerated() -> None:
    """Most steps must succeed at the first attempt."""
    ward = Ward(2)
    for _ in range(2 * MAX_PASSING_FAILURES):
        for _ in range(PASSING_WINDOW_STEPS // MAX_PASSING_FAILURES + 1):
            assert ward.failures.next_part() is None
            ward.failures.note_success()
        ward.failures.retry([ward.plan()])
        ward.succeed(ward.part())


def test_a_sequence_runs_after_the_one_whose_pages_it_shares() -> None:
    """In halves as in one step: its single token would run first and read pages not yet written."""
    ward = Ward(0)
    prefix = list(range(8))
    prompts = [[50, 51], [*prefix, 8, 9], [*prefix, 7], [60, 61]]
    for arrival, prompt in enumerate(prompts):
        ward.scheduler.add(Sequence(SequenceRequest(prompt, 4), arrival))
    plan = ward.plan()
    assert ward.of(plan)[0].request.prompt_ids == prompts[2]
    ward.failures.retry([plan])
    ward.fail()
    first, second = ward.part(), ward.failures._parts[0].plan
    assert sorted(one.request.prompt_ids[0] for one in ward.of(first)) == [0, 50]
    assert [*prefix, 7] in [one.request.prompt_ids for one in ward.of(second)]


def test_a_step_that_does_not_fit_is_halved_without_blame() -> None:
    """The newest half waits; sequences that were in too many such steps run alone."""
    ward = Ward(4)
    ward.succeed(ward.plan())
    for _ in range(MAX_FAILURES_IN_COMPANY):
        assert ward.sequences[3].is_suspect is False
        plan = ward.plan()
        assert ward.failures.make_room([plan]) is None
        assert ward.scheduler.step_limit.tokens == max(1, plan.num_tokens // 2)
        ward.scheduler.step_limit.tokens = BUDGET
    assert ward.sequences[3].is_suspect


def test_a_sequence_that_does_not_fit_alone_is_to_blame() -> None:
    """The other sequences may use as many pages again as before."""
    ward = Ward(1)
    ward.succeed(ward.plan())
    ward.scheduler.step_limit.lower(20)
    ward.scheduler.step_limit.lower(20)
    assert ward.failures.make_room([ward.plan()]) is ward.sequences[0]
    assert ward.scheduler.step_limit.tokens == BUDGET


@pytest.mark.parametrize("follow_up", ["retry", "make_room"])
def test_pages_of_a_failed_step_have_no_names(follow_up: str) -> None:
    """Pages that the step was to fill are not found in lookups."""
    ward = Ward(0)
    long = Sequence(SequenceRequest(list(range(12)), 1), 0)
    ward.scheduler.add(long)
    plan = ward.plan()
    assert ward.scheduler.pool.lookup(long.digests)
    if follow_up == "retry":
        ward.failures.retry([plan])
        ward.fail()
    else:
        ward.failures.make_room([plan])
    assert not ward.scheduler.pool.lookup(long.digests)


def test_a_sequence_aborted_before_the_rerun_leaves_no_names() -> None:
    """Its pages were to be filled by that step."""
    ward = Ward(0)
    long = Sequence(SequenceRequest(list(range(12)), 1), 0)
    ward.scheduler.add(long)
    ward.failures.retry([ward.plan()])
    ward.scheduler.drop({long})
    assert not ward.scheduler.pool.lookup(long.digests)
    assert ward.failures.next_part() is None


def test_a_placed_sequence_shares_no_pages_of_a_lost_step() -> None:
    """It was placed on a prefix that the lost step was to compute; it waits and is not to blame."""
    scheduler = Scheduler(
        SequenceTable(8, 64, 4), PagePool(64), UrgentFirst(ArrivalOrder()), BUDGET
    )
    failures = StepFailures(scheduler)
    prefix = list(range(9))
    prompts = [prefix, list(range(20, 60)), [*prefix, 9]]
    first, large, late = (
        Sequence(SequenceRequest(prompt, 4, priority=1), arrival)
        for arrival, prompt in enumerate(prompts)
    )
    plans = []
    for newcomers in ([first], [large, late]):
        for sequence in newcomers:
            scheduler.add(sequence)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.launch(plan)
        plans.append(plan)
    assert late in [scheduler.table.sequence(slot) for slot in scheduler.table.running.tolist()]
    for plan in reversed(plans):
        scheduler.undo(plan)
    assert failures.retry(plans) is None
    for culprit in (None, first):
        again = failures.next_part()
        assert again is not None
        assert failures.retry([again]) is culprit
    assert not len(scheduler.table.running)
    assert failures.next_part() is None
    assert waiting_urgently(scheduler) == [large, late]
    assert [sequence.num_failures for sequence in (large, late)] == [0, 0]


def waiting_urgently(scheduler: Scheduler) -> list[Sequence]:
    """Return the sequences that would start next, taking each out of the queue."""
    admission = scheduler._admission
    return [admission.pop() for _ in range(len(admission))]


def long_prompt(number: int) -> Sequence:
    """Return a sequence whose prompt fills four pages, the same for every sequence."""
    return Sequence(SequenceRequest(list(range(17)), 16), number)


def test_broken_pages_are_not_shared_further_while_a_step_reads_them() -> None:
    """All sequences that hold them have read the broken pages, so none proves them good."""
    ward = Ward(0)
    for number in range(2):
        ward.scheduler.add(long_prompt(number))
    first = ward.plan()
    ward.scheduler.launch(first)
    second = ward.plan()
    ward.scheduler.launch(second)
    ward.scheduler.collect(first, np.ones(2, np.int64), np.zeros(2, np.bool_))
    for slot in first.sampled.tolist():
        ward.scheduler.discard(slot)
    ward.scheduler.add(long_prompt(2))
    assert ward.plan().starts.tolist() == [0]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_pages_that_a_lost_step_was_to_fill_are_not_cached(*, is_preempted: bool) -> None:
    """It holds also if its sequence was preempted in the meantime and runs no step again."""
    ward = Ward(0)
    lost = long_prompt(0)
    ward.scheduler.add(lost)
    plan = ward.plan()
    ward.scheduler.launch(plan)
    if is_preempted:
        ward.scheduler.preempt(int(plan.slots[0]))
    else:
        ward.scheduler.drop({lost})
        ward.scheduler.add(long_prompt(1))
    ward.scheduler.undo(plan)
    ward.failures.retry([plan])
    assert ward.failures.next_part() is None
    assert ward.plan().starts.tolist() == [0]
