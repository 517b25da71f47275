"""Sequences that somebody waits for, beside lines of files."""

from __future__ import annotations

import pytest

from engine.scheduling.admission import ArrivalOrder, PrefixOrder, UrgentFirst
from engine.scheduling.courtesy import (
    LEAST_TOKENS,
    MOST_STEPS_ALONE,
    REMEMBERED_SECONDS,
    Courtesy,
)
from engine.scheduling.sequence import Sequence, SequenceRequest
from tests.engine.scheduling.yard import PAGE, Yard, expected_tokens, long


def beside_lines(**sizes: int) -> Yard:
    """Return a yard that knows of priorities."""
    return Yard(admission=UrgentFirst(ArrivalOrder()), **sizes)


def slots_of(yard: Yard, *sequences: Sequence) -> set[int]:
    """Return where running sequences are."""
    return {yard.slot_of(sequence) for sequence in sequences}


def test_who_is_waited_for_starts_before_lines_that_came_earlier() -> None:
    """In the order of arrival among their like."""
    order = UrgentFirst(PrefixOrder())
    for arrival, priority in enumerate([0, 1, 0, 1]):
        order.add(Sequence(SequenceRequest([9 - arrival], 1, priority=priority), arrival))
    assert len(order) == 4
    assert [order.take().arrival for _ in range(4) if order.first()] == [1, 3, 2, 0]


def test_who_is_given_back_or_unwanted_is_so_among_its_like() -> None:
    """A line that lost its pages waits behind who is waited for."""
    order = UrgentFirst(ArrivalOrder())
    urgent = [Sequence(SequenceRequest([1], 1, priority=1), arrival) for arrival in (2, 3)]
    lines = [Sequence(SequenceRequest([1], 1), arrival) for arrival in (0, 1)]
    for sequence in (*urgent, lines[1]):
        order.add(sequence)
    order.give_back(lines[0])
    order.remove({urgent[0], lines[1]})
    assert [order.take() for _ in range(2)] == [urgent[1], lines[0]]
    assert order.first() is None


def test_a_line_gives_its_slot_to_who_is_waited_for() -> None:
    """The newest does, at once, and goes on later; nobody waits for a line's end."""
    yard = beside_lines(max_num_seqs=2)
    lines = [yard.add(long(3, seed), 20) for seed in range(2)]
    yard.step()
    urgent = yard.add(long(5, 9), 3, priority=1)
    yard.step()
    assert slots_of(yard, lines[0], urgent) == {0, 1}
    assert lines[1].num_preemptions == 1
    yard.run_all()
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)
    assert yard.finished[0] is urgent


def test_lines_give_their_pages_to_who_is_waited_for() -> None:
    """As many as it needs, the newest line first."""
    yard = beside_lines(num_pages=10, max_num_seqs=4)
    lines = [yard.add(long(2 * PAGE, seed), 8) for seed in range(3)]
    yard.step()
    urgent = yard.add(long(6 * PAGE, 9), 2, priority=1)
    yard.step()
    assert yard.slot_of(urgent) in range(4)
    assert [line.num_preemptions for line in lines] == [0, 1, 1]
    yard.run_all()
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


def test_a_line_that_gave_way_has_only_its_last_page_to_compute_again() -> None:
    """Where its pages were not needed by another."""
    yard = beside_lines(max_num_seqs=1)
    line = yard.add(long(6 * PAGE - 1), 20)
    for _ in range(3):
        yard.step()
    yard.add(long(3, 9), 1, priority=1)
    yard.step()
    plan = yard.step()
    assert plan is not None
    assert yard.slot_of(line) == 0
    assert plan.starts.tolist() == [6 * PAGE]


def test_who_is_waited_for_gives_way_to_no_line() -> None:
    """However long it has been running less."""
    yard = beside_lines(num_pages=7, max_num_seqs=2)
    line = yard.add(long(2 * PAGE), 3 * PAGE)
    yard.step()
    urgent = yard.add(long(2 * PAGE, 9), 4 * PAGE - 1, priority=1)
    yard.run_all()
    assert line.num_preemptions > 0
    assert urgent.num_preemptions == 0
    assert yard.finished == [urgent, line]


def test_no_line_has_a_share_in_the_step_of_a_first_token() -> None:
    """The next one takes them along again."""
    yard = beside_lines()
    lines = [yard.add(long(3, seed), 20) for seed in range(2)]
    yard.step()
    urgent = yard.add(long(5, 9), 3, priority=1)
    alone = yard.step()
    together = yard.step()
    assert alone is not None
    assert together is not None
    assert set(alone.slots.tolist()) == slots_of(yard, urgent)
    assert set(together.slots.tolist()) == slots_of(yard, urgent, *lines)


def test_of_eight_steps_one_takes_lines_along() -> None:
    """However many first tokens are waited for."""
    yard = beside_lines(budget=4, max_num_seqs=3, num_pages=100)
    line = yard.add(long(2), 60)
    yard.step()
    slot = yard.slot_of(line)
    yard.add(long(60, 9), 1, priority=1)
    steps = [slot in plan.slots for _ in range(16) if (plan := yard.step()) is not None]
    assert steps == ([False] * MOST_STEPS_ALONE + [True]) * 2


def test_lines_take_what_courtesy_leaves_them() -> None:
    """Those that started first, also while others wait for their turn."""
    yard = Yard(
        admission=UrgentFirst(ArrivalOrder()),
        max_num_seqs=6,
        num_pages=100,
        courtesy=Courtesy(tokens=2),
    )
    lines = [yard.add(long(3, seed), 20) for seed in range(4)]
    yard.step()
    yard.add(long(3, 9), 20, priority=1)
    yard.step()
    plan = yard.step()
    assert plan is not None
    assert len(plan.slots) == 3
    assert slots_of(yard, *lines[:2]) < set(plan.slots.tolist())


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_lines_have_all_of_a_step_while_nobody_is_expected() -> None:
    """Before the first request, and a minute after the last."""
    clock = Clock()
    courtesy = Courtesy(clock, tokens=100)
    before = courtesy.tokens(2048, is_awaited=False)
    courtesy.expect()
    while_expected = courtesy.tokens(2048, is_awaited=False)
    clock.now += REMEMBERED_SECONDS
    assert (before, while_expected) == (2048, 100)
    assert courtesy.tokens(2048, is_awaited=False) == 2048


@pytest.mark.parametrize("seconds_a_token", [0.0001, 0.001])
def test_steps_with_lines_come_to_a_share_of_the_time_of_a_first_token(
    seconds_a_token: float,
) -> None:
    """Whatever a token costs, and wherever the bound began."""
    courtesy = Courtesy(Clock())
    courtesy.expect()
    courtesy.note(0.1 + 0.4 * (seconds_a_token == 0.001), num_line_tokens=0, is_first=True)
    for _ in range(40):
        tokens = courtesy.tokens(2048, is_awaited=False)
        seconds = 0.005 + seconds_a_token * tokens
        courtesy.note(seconds, num_line_tokens=tokens, is_first=False)
    wanted = 0.75 * (0.1 if seconds_a_token == 0.0001 else 0.5) - 0.005
    assert courtesy.tokens(2048, is_awaited=False) * seconds_a_token == pytest.approx(
        wanted, rel=0.1
    )


def test_lines_keep_a_least_share_however_short_a_first_token_is() -> None:
    """Else a batch would stand."""
    courtesy = Courtesy(Clock())
    courtesy.expect()
    courtesy.note(0.001, num_line_tokens=0, is_first=True)
    for _ in range(20):
        courtesy.note(1.0, num_line_tokens=300, is_first=False)
    assert courtesy.tokens(2048, is_awaited=False) == LEAST_TOKENS


def test_a_step_that_lines_did_not_fill_raises_nothing() -> None:
    """That it was short says nothing of what a full one takes."""
    courtesy = Courtesy(Clock(), tokens=200)
    courtesy.expect()
    courtesy.note(1.0, num_line_tokens=0, is_first=True)
    courtesy.note(0.01, num_line_tokens=10, is_first=False)
    assert courtesy.tokens(2048, is_awaited=False) == 200
