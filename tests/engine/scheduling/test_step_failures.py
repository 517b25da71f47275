"""After a step that failed: who starts over, who runs alone, who is to blame."""

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
    """Sequences of two tokens each, and what is made of the failures of their steps."""

    def __init__(self, num_sequences: int) -> None:
        self.scheduler = Scheduler(SequenceTable(8, 64, 4), PagePool(64), ArrivalOrder(), BUDGET)
        self.failures = StepFailures(self.scheduler)
        self.sequences = [
            Sequence(SequenceRequest([number, 7], 60), number) for number in range(num_sequences)
        ]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    def plan(self) -> StepPlan:
        """Return the next step, which there must be."""
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def of(self, plan: StepPlan) -> list[Sequence]:
        """Return the sequences of a step."""
        return [self.scheduler.table.sequence(slot) for slot in plan.slots.tolist()]

    def succeed(self, plan: StepPlan) -> None:
        """Let a step go well; no sequence ends."""
        ids = np.ones(len(plan.sampled), np.int64)
        self.scheduler.launch(plan)
        self.scheduler.collect(plan, ids, np.ones(len(ids), np.bool_))
        self.failures.note_success()

    def fail(self) -> Sequence | None:
        """Let the step that must come next fail."""
        return self.failures.retry([self.part()])

    def part(self) -> StepPlan:
        """Return the step that must run before any other."""
        part = self.failures.next_part()
        assert part is not None
        return part

    def sizes(self) -> list[int]:
        """Let all parts of a step go well and return how many sequences each has."""
        sizes = []
        while (part := self.failures.next_part()) is not None:
            sizes.append(len(part.slots))
            self.succeed(part)
        return sizes


def test_a_step_that_fails_runs_again_as_it_was() -> None:
    """A failure that passes sends nobody back to the beginning."""
    ward = Ward(3)
    plan = ward.plan()
    assert ward.failures.retry([plan]) is None
    assert ward.part() is plan
    ward.succeed(plan)
    assert ward.failures.next_part() is None
    assert not any(sequence.num_preemptions for sequence in ward.sequences)


def test_what_fails_again_is_halved_until_one_is_left_that_fails_twice() -> None:
    """The halves without it go well and are through; of the others nobody starts over."""
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


def test_two_who_are_to_blame_are_both_found() -> None:
    """The second by what is left of the same step."""
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


def test_who_left_meanwhile_is_not_among_what_runs_again() -> None:
    """And nothing of it is held."""
    ward = Ward(3)
    ward.succeed(ward.plan())
    ward.failures.retry([ward.plan()])
    ward.scheduler.drop({ward.sequences[1]})
    assert ward.of(ward.part()) == [ward.sequences[0], ward.sequences[2]]


def test_a_step_that_only_its_size_is_the_matter_with_is_followed_by_smaller_ones() -> None:
    """Its halves go well each time; from the third time on there is none of that size."""
    ward = Ward(8)
    for _ in range(MAX_FAILURES_IN_COMPANY):
        assert ward.scheduler.step_limit.tokens == BUDGET
        plan = ward.plan()
        ward.failures.retry([plan])
        ward.fail()
        assert ward.sizes() == [4, 4]
    assert ward.scheduler.step_limit.tokens == plan.num_tokens // 2


def test_a_device_most_of_whose_failures_pass_is_not_relied_on() -> None:
    """Every second step fails: nobody is to blame, and the numbers are not to be believed."""
    ward = Ward(2)
    for _ in range(MAX_PASSING_FAILURES):
        assert ward.failures.next_part() is None
        ward.failures.retry([ward.plan()])
        ward.succeed(ward.part())
    with pytest.raises(DeviceFailed, match="is unreliable"):
        ward.failures.next_part()


def test_failures_that_pass_now_and_then_are_endured() -> None:
    """As long as most steps go well at once."""
    ward = Ward(2)
    for _ in range(2 * MAX_PASSING_FAILURES):
        for _ in range(PASSING_WINDOW_STEPS // MAX_PASSING_FAILURES + 1):
            assert ward.failures.next_part() is None
            ward.failures.note_success()
        ward.failures.retry([ward.plan()])
        ward.succeed(ward.part())


def test_a_sequence_runs_after_the_one_whose_pages_it_shares() -> None:
    """In halves as in one step: its one token would be first, and would read what is not there."""
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


def test_a_step_that_does_not_fit_is_halved_and_accuses_nobody() -> None:
    """The newest half wait until they have been among them too often; then they run alone."""
    ward = Ward(4)
    ward.succeed(ward.plan())
    for _ in range(MAX_FAILURES_IN_COMPANY):
        assert ward.sequences[3].is_suspect is False
        plan = ward.plan()
        assert ward.failures.make_room([plan]) is None
        assert ward.scheduler.step_limit.tokens == max(1, plan.num_tokens // 2)
        ward.scheduler.step_limit.tokens = BUDGET
    assert ward.sequences[3].is_suspect


def test_one_token_that_does_not_fit_alone_has_an_owner() -> None:
    """And others may hold again what they might before."""
    ward = Ward(1)
    ward.succeed(ward.plan())
    ward.scheduler.step_limit.lower(20)
    ward.scheduler.step_limit.lower(20)
    assert ward.failures.make_room([ward.plan()]) is ward.sequences[0]
    assert ward.scheduler.step_limit.tokens == BUDGET


@pytest.mark.parametrize("follow_up", ["retry", "make_room"])
def test_what_a_failed_step_wrote_has_no_name(follow_up: str) -> None:
    """The pages that it was to fill are found by nobody."""
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


def test_who_leaves_before_its_step_runs_again_leaves_no_names() -> None:
    """Its pages were to be filled by that step."""
    ward = Ward(0)
    long = Sequence(SequenceRequest(list(range(12)), 1), 0)
    ward.scheduler.add(long)
    ward.failures.retry([ward.plan()])
    ward.scheduler.drop({long})
    assert not ward.scheduler.pool.lookup(long.digests)
    assert ward.failures.next_part() is None


def test_who_was_placed_and_not_begun_shares_nothing_of_a_lost_step() -> None:
    """Placed by a prefix that the lost step was to compute, it waits, too, and is not to blame."""
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
    """Return who would start next, taking each out of the queue."""
    admission = scheduler._admission
    return [admission.pop() for _ in range(len(admission))]


def long_prompt(number: int) -> Sequence:
    """Return a sequence whose prompt fills four pages, the same of each."""
    return Sequence(SequenceRequest(list(range(17)), 16), number)


def test_broken_pages_are_shared_by_nobody_else_while_a_step_still_reads_them() -> None:
    """All who hold them have read what is broken: none of them proves the pages."""
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
def test_what_a_lost_step_was_to_fill_is_known_to_nobody(*, is_preempted: bool) -> None:
    """Also where its sequence has left meanwhile, and runs no step again."""
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
