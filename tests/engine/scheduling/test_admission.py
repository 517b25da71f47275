"""Admission policies: the order in which waiting sequences start."""

from __future__ import annotations

from tests.engine.scheduling.yard import PAGE, Yard, expected_tokens, long
from tidemill.engine.scheduling.admission import Admission, ArrivalOrder, PrefixOrder
from tidemill.engine.scheduling.sequence import Sequence, SequenceRequest


def queued(order: Admission, *prompts: str, arrival: int = 0) -> list[Sequence]:
    """Queue a sequence for each text, with one token per letter."""
    sequences = [
        Sequence(SequenceRequest(list(map(ord, prompt)), 1), number)
        for number, prompt in enumerate(prompts, start=arrival)
    ]
    for sequence in sequences:
        order.add(sequence)
    return sequences


def start(order: Admission) -> Sequence:
    """Start the next sequence."""
    first = order.peek()
    assert first is not None
    assert order.pop() is first
    return first


def started(order: Admission) -> list[int]:
    """Start all waiting sequences, and return their arrivals in the order of their starts."""
    arrivals = [start(order).arrival for _ in range(len(order))]
    assert order.peek() is None
    return arrivals


def test_sequences_with_a_common_prefix_start_one_after_another() -> None:
    """Their positions in the file do not matter."""
    order = PrefixOrder()
    queued(order, "docA one", "docB one", "docA two", "docC one", "docB two", "docA")
    assert len(order) == 6
    assert started(order) == [5, 0, 2, 1, 4, 3]


def test_salts_are_kept_apart() -> None:
    """Sequences with different salts share no page, regardless of their prompts."""
    order = PrefixOrder()
    for arrival, salt in enumerate(["", "a", "", "a"]):
        order.add(Sequence(SequenceRequest([7, 8], 1, cache_salt=salt), arrival))
    assert started(order) == [0, 2, 1, 3]


def test_adapters_are_kept_apart() -> None:
    """They share no page either, and a step with few of them costs less."""
    order = PrefixOrder()
    for arrival, adapter in enumerate([1, 0, 1, 0]):
        order.add(Sequence(SequenceRequest([8 - arrival], 1, adapter=adapter), arrival))
    assert started(order) == [3, 1, 2, 0]


def test_of_equal_prompts_the_longest_answer_starts_first() -> None:
    """Among equal requests the first arrival starts first."""
    order = PrefixOrder()
    for arrival, max_tokens in enumerate([3, 9, 3, 9]):
        order.add(Sequence(SequenceRequest([7, 8], max_tokens), arrival))
    assert started(order) == [1, 3, 0, 2]


def test_later_arrivals_join_the_round_if_their_place_is_ahead() -> None:
    """They join sequences with the same prefix; the others wait for the next round."""
    order = PrefixOrder()
    queued(order, "b", "d", "f")
    assert start(order).arrival == 0
    queued(order, "a", "e", "dd", arrival=3)
    assert started(order) == [1, 5, 4, 2, 3]


def test_a_round_at_most_doubles() -> None:
    """The number of later arrivals does not matter."""
    order = PrefixOrder()
    queued(order, "a", "z")
    assert start(order).arrival == 0
    queued(order, "b", "c", "d", arrival=2)
    assert started(order) == [2, 3, 1, 4]


def test_preempted_sequences_start_before_all_others() -> None:
    """They start in the order of arrival, within the current round."""
    order = PrefixOrder()
    sequences = queued(order, "c", "b", "a")
    assert [start(order) for _ in range(2)] == [sequences[2], sequences[1]]
    for sequence in sequences[2:0:-1]:
        order.requeue(sequence)
    assert len(order) == 3
    assert started(order) == [1, 2, 0]


def test_removed_sequences_leave_every_queue() -> None:
    """They were preempted, or wait for this round or the next."""
    order = PrefixOrder()
    sequences = queued(order, "a", "b", "c", "d")
    order.requeue(start(order))
    later = queued(order, "e", "f", arrival=4)
    order.remove({sequences[0], sequences[2], later[0]})
    assert started(order) == [1, 3, 5]


def test_on_few_pages_a_common_prefix_is_computed_once() -> None:
    """Its sequences are far apart in the file; by arrival it would be computed repeatedly."""
    documents = [long(6 * PAGE, seed) for seed in range(4)]
    computed = {}
    for order in (ArrivalOrder(), PrefixOrder()):
        yard = Yard(num_pages=16, max_num_seqs=2, admission=order)
        for question in range(3):
            for document in documents:
                yard.add([*document, question, 1], 2)
        yard.run_all(200)
        for sequence in yard.finished:
            assert sequence.generated == expected_tokens(sequence.request)
        computed[type(order)] = sum(
            len(one.prompt) - one.num_cached_tokens for one in yard.finished
        )
    assert computed[PrefixOrder] <= 4 * 6 * PAGE + 12 * 2
    assert computed[ArrivalOrder] > 2 * computed[PrefixOrder]
