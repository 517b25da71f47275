"""The clock that decides when an engine has stalled."""

from __future__ import annotations

from itertools import count

import pytest

from tidemill.protocol.stall import SLOW_LOOP_FACTOR, StallClock

LIMIT = 4.0  # in ticks of a second


def test_an_engine_with_requests_and_no_progress_stalls_after_the_limit() -> None:
    """The reason has the time and the number of requests."""
    clock = StallClock(LIMIT)
    assert clock.tick_seconds == 1.0
    found = [clock.note_tick(3, "same", beats=n, turns=n) for n in range(1, 7)]
    assert found == [None] * 5 + ["no step has finished for 4 s, with 3 requests in the engine"]


def test_the_message_agrees_in_number() -> None:
    """One request is singular."""
    clock = StallClock(LIMIT)
    found = [clock.note_tick(1, "same", beats=0, turns=0) for _ in range(9)]
    assert any(reason and reason.endswith("with 1 request in the engine") for reason in found)


@pytest.mark.parametrize("num_requests", [0, 1])
def test_an_engine_that_is_idle_or_works_never_stalls(num_requests: int) -> None:
    """A step, a layer, a row or a part of a stream changes the work."""
    clock = StallClock(LIMIT)
    for number in range(50):
        work = number // 4 if num_requests else "same"  # every fourth tick makes progress
        assert clock.note_tick(num_requests, work, beats=number, turns=number) is None


def test_a_blocked_event_loop_has_a_multiple_of_the_limit() -> None:
    """Its process is alive, as the heartbeat shows."""
    clock = StallClock(LIMIT)
    for number in count(1):
        reason = clock.note_tick(1, "same", beats=number, turns=0)
        if reason is not None:
            break
    assert reason == "its event loop has been blocked for 20 s, with 1 request in the engine"
    assert number > SLOW_LOOP_FACTOR * LIMIT


def test_a_process_without_a_heartbeat_is_not_slow() -> None:
    """A frozen process stalls after the limit, although its event loop is not running either."""
    clock = StallClock(LIMIT)
    found = [clock.note_tick(1, "same", beats=0, turns=0) for _ in range(8)]
    assert any(reason and reason.startswith("no step has finished for 4 s") for reason in found)
