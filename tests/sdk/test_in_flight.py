"""Requests in flight are bounded, by their number and by their bytes."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tidemill.sdk.in_flight import MAX_INFLIGHT_BYTES, InFlight, Sent


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [(2, 1), (100, MAX_INFLIGHT_BYTES // 2), (1, MAX_INFLIGHT_BYTES)]
)
def test_the_next_request_waits_for_room(limit: int, num_bytes: int) -> None:
    """Few large ones are as many as a lot of small ones; an answer that is taken makes room."""
    running = InFlight[int](limit, lambda: None, in_order=True)
    futures: list[Future[int]] = []
    while not running.is_full:
        futures.append(Future())
        running.add(Sent(futures[-1], num_bytes))
    assert len(futures) == min(2, limit)
    futures[0].set_result(7)
    assert running.is_full
    assert list(running.take()) == [(0, 7)]
    assert not running.is_full
