"""Requests in flight are bounded, by their number and by their bytes."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from tidemill.sdk import in_flight
from tidemill.sdk.in_flight import MAX_INFLIGHT_BYTES, InFlight, Sent, answers_to


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


@pytest.mark.parametrize("in_order", [True, False])
def test_an_answer_whose_notification_fails_is_found(
    monkeypatch: pytest.MonkeyPatch, *, in_order: bool
) -> None:
    """A future ignores what its callbacks raise, such as an exception for lack of memory."""
    monkeypatch.setattr(in_flight, "MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(InFlight, "_wake", lambda *_: 1 / 0)
    future: Future[int] = Future()
    threading.Timer(0.05, future.set_result, [7]).start()
    assert list(answers_to([Sent(future, 1)], 4, in_order=in_order)) == [(0, 7)]
