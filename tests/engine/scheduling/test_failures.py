"""After a step that failed: who starts over, who runs alone, who is to blame."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.admission import ArrivalOrder, UrgentFirst
from engine.scheduling.failures import MAX_FAILURES_IN_COMPANY, Failures
from engine.scheduling.pages import PagePool
from engine.scheduling.scheduler import Scheduler, StepPlan
from engine.scheduling.sequence import Sequence, SequenceRequest
from engine.scheduling.table import SequenceTable
from tests.engine.scheduling.yard import waiting

BUDGET = 32


class Ward:
    """Sequences of two tokens each, and what is made of the failures of their steps."""

    def __init__(self, num_sequences: int) -> None:
        self.scheduler = Scheduler(SequenceTable(8, 64, 4), PagePool(64), ArrivalOrder(), BUDGET)
        self.failures = Failures(self.scheduler)
        self.sequences = [
            Sequence(SequenceRequest([number, 7], 9), number) for number in range(num_sequences)
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
        self.scheduler.collect(plan, ids, np.zeros(len(ids), np.bool_))
        self.failures.note_success(plan)


def test_after_an_exception_all_start_over_and_each_alone() -> None:
    """They wait in their order; none is to blame for what happened in company."""
    ward = Ward(3)
    assert ward.failures.start_over([ward.plan()]) is None
    assert waiting(ward.scheduler) == ward.sequences
    assert ward.of(ward.plan()) == ward.sequences[:1]


def test_who_fails_alone_as_well_is_to_blame() -> None:
    """It leaves for good; those that did well alone run together again."""
    ward = Ward(3)
    ward.failures.start_over([ward.plan()])
    ward.succeed(ward.plan())
    assert ward.failures.start_over([ward.plan()]) is ward.sequences[1]
    ward.succeed(ward.plan())
    innocent = [ward.sequences[0], ward.sequences[2]]
    assert sorted(ward.of(ward.plan()), key=innocent.index) == innocent


def test_a_first_failure_alone_is_no_proof() -> None:
    """It may pass: the sequence is tried once more."""
    ward = Ward(1)
    assert ward.failures.start_over([ward.plan()]) is None
    assert ward.failures.start_over([ward.plan()]) is ward.sequences[0]


def test_a_step_that_does_not_fit_is_halved_and_accuses_nobody() -> None:
    """The newest half wait until they have been among them too often; then they run alone."""
    ward = Ward(4)
    ward.succeed(ward.plan())
    for _ in range(MAX_FAILURES_IN_COMPANY):
        assert ward.sequences[3].is_suspect is False
        plan = ward.plan()
        assert ward.failures.make_room([plan]) is None
        assert ward.scheduler.bound.tokens == max(1, plan.num_tokens // 2)
        ward.scheduler.bound.tokens = BUDGET
    assert ward.sequences[3].is_suspect
    assert not any(sequence.is_accused for sequence in ward.sequences)


def test_one_token_that_does_not_fit_alone_has_an_owner() -> None:
    """And others may hold again what they might before."""
    ward = Ward(1)
    ward.succeed(ward.plan())
    ward.scheduler.bound.lower(20)
    ward.scheduler.bound.lower(20)
    assert ward.failures.make_room([ward.plan()]) is ward.sequences[0]
    assert ward.scheduler.bound.tokens == BUDGET


@pytest.mark.parametrize("follow_up", ["start_over", "make_room"])
def test_what_a_failed_step_wrote_has_no_name(follow_up: str) -> None:
    """The pages that it was to fill are found by nobody."""
    ward = Ward(0)
    long = Sequence(SequenceRequest(list(range(12)), 1), 0)
    ward.scheduler.add(long)
    plan = ward.plan()
    assert ward.scheduler.pool.lookup(long.digests)
    getattr(ward.failures, follow_up)([plan])
    assert not ward.scheduler.pool.lookup(long.digests)


def test_who_was_placed_and_not_begun_shares_nothing_of_a_lost_step() -> None:
    """Placed by a prefix that the lost step was to compute, it waits, too, and is not to blame."""
    scheduler = Scheduler(
        SequenceTable(8, 64, 4), PagePool(64), UrgentFirst(ArrivalOrder()), BUDGET
    )
    failures = Failures(scheduler)
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
    failures.start_over(plans)
    assert not len(scheduler.table.running)
    assert [first.is_suspect, large.is_suspect, late.is_suspect] == [True, True, False]
