"""Sequences start if the KV cache can hold all running ones to their ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scheduling.yard import PAGE, Yard, expected_tokens
from tidemill.engine.scheduling.kv_forecast import KVForecast, _peak
from tidemill.engine.scheduling.sequence import SequenceRequest

lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12)


def yard_with_forecast(num_pages: int, max_num_seqs: int = 8) -> Yard:
    """Return a yard whose scheduler forecasts."""
    yard = Yard(num_pages=num_pages, max_num_seqs=max_num_seqs)
    yard.scheduler._placer.forecast = KVForecast(yard.table, yard.pool)
    return yard


@given(lengths)
def test_a_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]]) -> None:
    """Step by step: all grow by one token, and an ended sequence releases its tokens."""
    own, left = (np.array(column) for column in zip(*sequences, strict=True))
    most, alive = 0, left > 0
    for step in range(1, int(left.max()) + 1):
        alive = left >= step
        ended = int(own[~alive].sum())
        most = max(most, int(alive.sum()) * step - ended)
    assert _peak(left, own) == most


@given(lengths, st.integers(10, 24))
def test_no_sequence_with_a_known_length_is_preempted(
    sequences: list[tuple[int, int]], num_pages: int
) -> None:
    """With few pages, up to a part of a page each, all results are the same."""
    yard = yard_with_forecast(num_pages)
    rng = np.random.default_rng(0)
    requests = [
        SequenceRequest(rng.integers(0, 3, prompt).tolist(), output) for prompt, output in sequences
    ]
    for request in requests:
        yard.add_request(request)
    while yard.is_busy:
        yard.run(yard.plan())
    assert [one.generated for one in sorted(yard.finished, key=lambda one: one.arrival)] == [
        expected_tokens(request) for request in requests
    ]
    # The simulation counts tokens: each sequence's last page is partly free.
    assert yard.scheduler.num_preemptions <= len(requests)


def test_long_answers_do_not_start_all_at_once() -> None:
    """Four of 40 tokens fit half grown into 24 pages, and two to their ends."""
    yard, prompt = yard_with_forecast(24, 4), [1] * PAGE
    without = Yard(num_pages=24, max_num_seqs=4)
    for each in (yard, without):
        for number in range(4):
            each.add([number % 3, *prompt], 40)
        while each.is_busy:
            each.run(each.plan())
    assert yard.scheduler.num_preemptions == 0 < without.scheduler.num_preemptions


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_answers_that_may_end_are_as_long_as_those_before(share: float) -> None:
    """The share of `max_tokens` is learned; at first a quarter is expected."""
    yard = Yard()
    forecast = KVForecast(yard.table, yard.pool)
    request = SequenceRequest([1, 2], 50, stop_token_ids=frozenset({9}))
    assert forecast._expected_of(request) == round(0.25 * 50)
    for _ in range(200):
        sequence = yard.add_request(request)
        sequence.generated = [0] * round(share * 50)
        forecast.note_end(sequence)
    assert abs(forecast._expected_of(request) - share * 50) <= 1
    assert forecast._expected_of(SequenceRequest([1, 2], 50)) == 50
