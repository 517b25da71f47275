"""Interactive sequences next to sequences of batch files."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling.counted_priority import CountedPriority
from tests.engine.scheduling.yard import PAGE, Yard, expected_tokens, long
from tidemill.engine.scheduling.admission import (
    ArrivalOrder,
    PrefixOrder,
    RoundRobin,
    UrgentFirst,
)
from tidemill.engine.scheduling.sequence import Sequence, SequenceRequest
from tidemill.engine.scheduling.step_budget import (
    LEAST_TOKENS,
    MOST_STEPS_ALONE,
    REMEMBERED_SECONDS,
    LineTokenLimit,
)


def mixed_yard(**sizes: int) -> Yard:
    """Return a yard with priorities."""
    return Yard(admission=UrgentFirst(ArrivalOrder()), **sizes)


def slots_of(yard: Yard, *sequences: Sequence) -> set[int]:
    """Return the slots of running sequences."""
    return {yard.slot_of(sequence) for sequence in sequences}


def test_interactive_sequences_start_before_earlier_batch_rows() -> None:
    """Among themselves they start in the order of arrival."""
    order = UrgentFirst(PrefixOrder())
    for arrival, priority in enumerate([None, 1, None, 1]):
        order.add(Sequence(SequenceRequest([9 - arrival], 1, priority=priority), arrival))
    assert len(order) == 4
    assert [order.pop().arrival for _ in range(4) if order.peek()] == [1, 3, 2, 0]


def test_the_lowest_priority_starts_first_and_equal_ones_in_turn() -> None:
    """A returned sequence keeps its priority, and rows of files come last."""
    order = UrgentFirst(ArrivalOrder())
    for arrival, priority in enumerate([0, None, 7, 0, -3]):
        order.add(Sequence(SequenceRequest([1], 1, priority=priority), arrival))
    first = order.pop()
    order.requeue(first)
    assert len(order) == 5
    assert [order.pop().arrival for _ in range(5)] == [4, 0, 3, 2, 1]
    assert (len(order), order.peek()) == (0, None)


@pytest.mark.parametrize("num_priorities", [1, 1000])
def test_a_sequence_costs_few_comparisons_however_many_priorities_wait(num_priorities: int) -> None:
    """Sequences also start in order after some were removed."""
    order = UrgentFirst(ArrivalOrder())
    numbers = [number % num_priorities for number in range(1000)]
    random.Random(0).shuffle(numbers)
    with CountedPriority.counting() as count:
        for arrival, number in enumerate(numbers):
            request = SequenceRequest([1], 1, priority=CountedPriority(number))
            order.add(Sequence(request, arrival))
        first = order.peek()
        assert first is not None
        order.remove({first})
        started = []
        while (sequence := order.peek()) is not None:
            assert len(order) == len(numbers) - 1 - len(started)
            started.append(sequence.request.priority)
            assert order.pop() is sequence
    assert [first.request.priority, *started] == sorted(numbers)
    assert count() < (40 * len(numbers) if num_priorities > 1 else 10)


def test_the_highest_priority_number_gives_up_its_pages_first() -> None:
    """It is preempted although it started first, and both are finished."""
    yard = mixed_yard(num_pages=7, max_num_seqs=2)
    later = yard.add(long(2 * PAGE), 3 * PAGE, priority=5)
    yard.step()
    sooner = yard.add(long(2 * PAGE, 9), 3 * PAGE, priority=-5)
    yard.run_all()
    assert (sooner.num_preemptions, later.num_preemptions > 0) == (0, True)
    assert yard.finished == [sooner, later]
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


def test_a_waiting_sequence_preempts_no_interactive_one_of_a_higher_number() -> None:
    """It gets the next free slot, before others that arrived earlier."""
    yard = mixed_yard(max_num_seqs=1)
    running = yard.add(long(3), 4, priority=9)
    yard.step()
    waiting = [yard.add(long(3, seed), 2, priority=seed) for seed in (3, 1)]
    yard.run_all()
    assert running.num_preemptions == 0
    assert yard.finished == [running, *reversed(waiting)]


def test_a_request_with_priority_keeps_all_of_its_slots() -> None:
    """Another request waits, unless it comes first or is equal."""
    for priority, num_preempted in ((0, 0), (-1, 1), (-2, 1)):
        yard = among_requests(max_num_seqs=2)
        many = [yard.add(long(5, seed), 8, priority=-1, request_id="many") for seed in range(2)]
        yard.step()
        yard.add(long(5, 9), 2, priority=priority, request_id="one")
        yard.step()
        assert sum(sequence.num_preemptions for sequence in many) == num_preempted
        yard.run_all()
        assert len(yard.finished) == 3


def test_an_interactive_sequence_needs_the_same_steps_next_to_a_full_batch() -> None:
    """Its tokens wait for no row; a sequence of tier `flex`, which is as a row, waits for them."""

    def num_steps(num_rows: int, **options: Any) -> int:
        yard = mixed_yard(max_num_seqs=4, num_pages=200, max_model_len=128)
        for seed in range(num_rows):
            yard.add(long(5, seed), 40)
        if num_rows:
            yard.step()
        request, before = yard.add(long(5, 99), 6, **options), yard.num_steps
        while request not in yard.finished:
            yard.step()
        return yard.num_steps - before

    assert num_steps(12, priority=0) == num_steps(0, priority=0)
    assert num_steps(12) > 40


def test_returned_or_aborted_sequences_stay_in_their_class() -> None:
    """A batch row that lost its pages waits behind interactive sequences."""
    order = UrgentFirst(ArrivalOrder())
    urgent = [Sequence(SequenceRequest([1], 1, priority=1), arrival) for arrival in (2, 3)]
    lines = [Sequence(SequenceRequest([1], 1), arrival) for arrival in (0, 1)]
    for sequence in (*urgent, lines[1]):
        order.add(sequence)
    order.requeue(lines[0])
    order.remove({urgent[0], lines[1]})
    assert [order.pop() for _ in range(2)] == [urgent[1], lines[0]]
    assert order.peek() is None


def test_a_batch_row_gives_its_slot_to_an_interactive_sequence() -> None:
    """The newest row is preempted immediately and resumes later; no request waits for its end."""
    yard = mixed_yard(max_num_seqs=2)
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


def test_batch_rows_give_their_pages_to_interactive_sequences() -> None:
    """They give as many pages as needed, the newest row first."""
    yard = mixed_yard(num_pages=10, max_num_seqs=4)
    lines = [yard.add(long(2 * PAGE, seed), 8) for seed in range(3)]
    yard.step()
    urgent = yard.add(long(6 * PAGE, 9), 2, priority=1)
    yard.step()
    assert yard.slot_of(urgent) in range(4)
    assert [line.num_preemptions for line in lines] == [0, 1, 1]
    yard.run_all()
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


def test_a_preempted_row_recomputes_only_its_last_page() -> None:
    """It holds if no other sequence needed its pages."""
    yard = mixed_yard(max_num_seqs=1)
    line = yard.add(long(6 * PAGE - 1), 20)
    for _ in range(3):
        yard.step()
    yard.add(long(3, 9), 1, priority=1)
    yard.step()
    plan = yard.step()
    assert plan is not None
    assert yard.slot_of(line) == 0
    assert plan.starts.tolist() == [6 * PAGE]


def test_an_interactive_sequence_is_never_preempted_for_a_row() -> None:
    """It holds even if it started later than the row."""
    yard = mixed_yard(num_pages=7, max_num_seqs=2)
    line = yard.add(long(2 * PAGE), 3 * PAGE)
    yard.step()
    urgent = yard.add(long(2 * PAGE, 9), 4 * PAGE - 1, priority=1)
    yard.run_all()
    assert line.num_preemptions > 0
    assert urgent.num_preemptions == 0
    assert yard.finished == [urgent, line]


def test_a_step_for_a_first_token_contains_no_batch_rows() -> None:
    """The next step includes the rows again."""
    yard = mixed_yard()
    lines = [yard.add(long(3, seed), 20) for seed in range(2)]
    yard.step()
    urgent = yard.add(long(5, 9), 3, priority=1)
    alone = yard.step()
    together = yard.step()
    assert alone is not None
    assert together is not None
    assert set(alone.slots.tolist()) == slots_of(yard, urgent)
    assert set(together.slots.tolist()) == slots_of(yard, urgent, *lines)


def test_one_of_eight_steps_includes_batch_rows() -> None:
    """It holds however many requests wait for their first tokens."""
    yard = mixed_yard(budget=4, max_num_seqs=3, num_pages=100)
    line = yard.add(long(2), 60)
    yard.step()
    slot = yard.slot_of(line)
    yard.add(long(60, 9), 1, priority=1)
    steps = [slot in plan.slots for _ in range(16) if (plan := yard.step()) is not None]
    assert steps == ([False] * MOST_STEPS_ALONE + [True]) * 2


def test_batch_rows_use_the_remaining_budget() -> None:
    """The rows that started first run, even while others wait for their turn."""
    yard = Yard(
        admission=UrgentFirst(ArrivalOrder()),
        max_num_seqs=6,
        num_pages=100,
        line_limit=LineTokenLimit(tokens=2),
    )
    lines = [yard.add(long(3, seed), 20) for seed in range(4)]
    yard.step()
    yard.add(long(3, 9), 20, priority=1)
    yard.step()
    plan = yard.step()
    assert plan is not None
    assert len(plan.slots) == 3
    assert slots_of(yard, *lines[:2]) < set(plan.slots.tolist())


def test_interactive_sequences_of_one_prompt_compute_it_once() -> None:
    """The questions of one request arrive together; the others wait until its chunks are done."""
    admission = UrgentFirst(ArrivalOrder(), {"a": 1})  # "b" has its turn first
    yard = Yard(num_pages=100, max_num_seqs=8, budget=12, admission=admission)
    common = long(8 * PAGE)
    sequences = [yard.add([*common, token, 0], priority=1, request_id="a") for token in range(3)]
    yard.step()
    other = yard.add(long(3, 9), priority=1, request_id="b")
    yard.run_all()
    assert [one.num_cached_tokens for one in sequences] == [0, 8 * PAGE, 8 * PAGE]
    assert yard.finished[0] is other


def test_interactive_sequences_that_wait_for_a_prompt_still_preempt_rows() -> None:
    """All slots belong to rows: the second question takes one once the prompt is computed."""
    yard = mixed_yard(max_num_seqs=2, num_pages=100)
    lines = [yard.add(long(3, seed), 40) for seed in range(2)]
    yard.step()
    common = long(3 * PAGE)
    questions = [yard.add([*common, token], 30, priority=1, request_id="a") for token in range(2)]
    yard.step()
    yard.step()
    assert {yard.slot_of(one) for one in questions} == {0, 1}
    assert [line.num_preemptions for line in lines] == [1, 1]
    assert questions[1].num_cached_tokens == 3 * PAGE


class Clock:
    """A clock that changes only when it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_batch_rows_use_whole_steps_when_no_request_is_expected() -> None:
    """It is so before the first request and from a minute after the last one."""
    clock = Clock()
    line_limit = LineTokenLimit(clock, tokens=100)
    before = line_limit.tokens(2048, is_awaited=False)
    line_limit.expect()
    while_expected = line_limit.tokens(2048, is_awaited=False)
    clock.now += REMEMBERED_SECONDS
    assert (before, while_expected) == (2048, 100)
    assert line_limit.tokens(2048, is_awaited=False) == 2048


@pytest.mark.parametrize("seconds_a_token", [0.0001, 0.001])
def test_steps_with_rows_converge_to_a_share_of_the_first_token_time(
    seconds_a_token: float,
) -> None:
    """It holds whatever a token costs and wherever the bound started."""
    line_limit = LineTokenLimit(Clock())
    line_limit.expect()
    line_limit.note(0.1 + 0.4 * (seconds_a_token == 0.001), num_line_tokens=0, is_first=True)
    for _ in range(40):
        tokens = line_limit.tokens(2048, is_awaited=False)
        seconds = 0.005 + seconds_a_token * tokens
        line_limit.note(seconds, num_line_tokens=tokens, is_first=False)
    wanted = 0.75 * (0.1 if seconds_a_token == 0.0001 else 0.5) - 0.005
    assert line_limit.tokens(2048, is_awaited=False) * seconds_a_token == pytest.approx(
        wanted, rel=0.1
    )


def test_batch_rows_retain_a_minimum_share_however_short_a_first_token_is() -> None:
    """Otherwise a batch would make no progress."""
    line_limit = LineTokenLimit(Clock())
    line_limit.expect()
    line_limit.note(0.001, num_line_tokens=0, is_first=True)
    for _ in range(20):
        line_limit.note(1.0, num_line_tokens=300, is_first=False)
    assert line_limit.tokens(2048, is_awaited=False) == LEAST_TOKENS


def test_a_step_that_rows_did_not_fill_does_not_raise_the_bound() -> None:
    """A short step does not show how long a full one takes."""
    line_limit = LineTokenLimit(Clock(), tokens=200)
    line_limit.expect()
    line_limit.note(1.0, num_line_tokens=0, is_first=True)
    line_limit.note(0.01, num_line_tokens=10, is_first=False)
    assert line_limit.tokens(2048, is_awaited=False) == 200


def among_requests(**sizes: int) -> Yard:
    """Return a yard whose requests take turns."""
    yard = Yard(**sizes)
    yard.scheduler._admission = UrgentFirst(ArrivalOrder(), yard.table.num_running_of)
    return yard


def add_interactive(yard: Yard, request_id: str, count: int, max_tokens: int = 8) -> list[Sequence]:
    """Queue the sequences of an interactive request."""
    return [
        yard.add(long(5, yard.num_added), max_tokens, priority=1, request_id=request_id)
        for _ in range(count)
    ]


def test_requests_take_turns_one_sequence_each() -> None:
    """A request without running sequences is first; a returned sequence precedes its siblings."""
    running: dict[str, int] = {}
    turns = RoundRobin(running)
    ids = ["many", "many", "many", "few", "few", "one"]
    for arrival, name in enumerate(ids):
        turns.add(Sequence(SequenceRequest([1], 1, request_id=name), arrival))
    assert [turns.pop().arrival for _ in range(4) if turns.peek()] == [0, 3, 5, 1]
    turns.requeue(Sequence(SequenceRequest([1], 1, request_id="many"), 1))
    assert len(turns) == 3
    running["few"] = 1
    assert [turns.pop().arrival for _ in range(2) if turns.peek()] == [1, 2]
    last = turns.peek()
    assert last is not None
    turns.remove({last})
    assert (len(turns), turns.peek()) == (0, None)


def test_a_request_of_many_sequences_gives_a_slot_to_a_request_with_none() -> None:
    """The newest of its sequences is preempted immediately; no request gives up its last one."""
    yard = among_requests(max_num_seqs=3)
    many = add_interactive(yard, "many", 20)
    yard.step()
    one, other, third = (add_interactive(yard, name, 1, 2)[0] for name in ("a", "b", "c"))
    yard.step()
    assert slots_of(yard, many[0], one, other) == {0, 1, 2}
    assert [sequence.num_preemptions for sequence in many[:4]] == [0, 1, 1, 0]
    assert third.start_order == -1
    yard.run_all()
    assert [yard.finished.index(sequence) for sequence in (one, other)] == [0, 1]
    assert yard.finished.index(third) < 6
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


def test_a_request_of_many_sequences_gives_its_pages_to_a_request_with_none() -> None:
    """It gives up as many sequences as hold those pages."""
    yard = among_requests(num_pages=8, max_num_seqs=8)
    many = add_interactive(yard, "many", 4)
    yard.step()
    one = yard.add(long(4 * PAGE, 99), 2, priority=1, request_id="one")
    yard.step()
    assert yard.slot_of(one) in range(8)
    assert many[0].num_preemptions == 0
    yard.run_all()
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)


def test_prompts_of_requests_are_computed_in_turns() -> None:
    """A short one waits for one prompt of the other request, not for all of them."""
    yard = among_requests(max_num_seqs=8, budget=8, num_pages=200)
    many = [yard.add(long(30, seed), 2, priority=1, request_id="many") for seed in range(7)]
    yard.step()
    one = add_interactive(yard, "one", 1, 1)[0]
    for _ in range(6):
        yard.step()
    assert one in yard.finished
    yard.run_all()
    assert len(yard.finished) == len(many) + 1


def test_a_prompt_does_not_wait_for_an_equal_one_of_another_request() -> None:
    """The other one comes after a longer prompt of its request."""
    yard = among_requests(max_num_seqs=8, budget=8, num_pages=200)
    first, _ = (yard.add(long(n, n), 2, priority=1, request_id="many") for n in (60, 20))
    yard.step()
    one = yard.add(long(20, 20), 2, priority=1, request_id="one")
    while one not in yard.finished:
        yard.step()
    assert first not in yard.finished
    yard.run_all()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 12), st.booleans()),
        max_size=24,
    ),
    st.integers(1, 4),
    st.integers(0, 1),
)
def test_turns_do_not_change_the_results_of_any_sequence(
    requests: list[tuple[str, int, int, bool]], max_num_seqs: int, steps_ahead: int
) -> None:
    """Requests run next to batch rows with few slots and pages, and all of them finish."""
    yard = among_requests(max_num_seqs=max_num_seqs, num_pages=12, steps_ahead=steps_ahead)
    for number, (name, length, max_tokens, is_line) in enumerate(requests):
        priority = 0 if is_line else 1
        request_id = f"line {number}" if is_line else name
        yard.add(long(length, number), max_tokens, priority=priority, request_id=request_id)
        if number % 3 == 0:
            yard.step()
    yard.run_all()
    assert len(yard.finished) == len(requests)
    for sequence in yard.finished:
        assert sequence.generated == expected_tokens(sequence.request)
    assert yard.table.num_running_of == {}
    yard.check_empty()
