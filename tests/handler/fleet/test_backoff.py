"""Backoff after capacity shortages."""

from __future__ import annotations

import pytest

from tidemill.batch.fleet import EndKind, FleetState, Launch, Worker, WorkerEnd, WorkerStatus
from tidemill.handler.fleet.backoff import back_off, reset_backoff

BAD = WorkerEnd("m", "bad", "r:1", 50, EndKind.CRASHED, "It died.")


def refusal(at: int, worker: str = "") -> WorkerEnd:
    """Return the end of a worker that had no machine."""
    return WorkerEnd("m", worker or f"w{at}", "r:1", at, EndKind.NO_CAPACITY, f"none at {at}")


def test_pauses_double_up_to_a_quarter_of_an_hour() -> None:
    """Each try comes when the pause is over; after a quiet hour the pauses start from scratch."""
    state, pauses = FleetState(ends=(BAD,)), []
    for _ in range(7):
        state = back_off(state, refusal(state.not_before))
        pauses.append(state.not_before - state.ends[-1].at)
    assert pauses == [60, 120, 240, 480, 900, 900, 900]
    assert state.refusal == state.ends[-1].reason
    assert state.ends[0] == BAD
    later = back_off(state, refusal(state.not_before + 3600))
    assert later.not_before == later.ends[-1].at + 60
    assert len(later.ends) == 2


def test_ten_simultaneous_refusals_count_once() -> None:
    """They are refused within seconds, each with a separate event, perhaps twice."""
    launches = tuple(Launch(f"w{number}", "r:1", 100) for number in range(10))
    state = FleetState(launches=launches)
    for number in (*range(10), 3):
        state = back_off(state, refusal(200 + number, f"w{number}"))
    assert state.not_before == 260
    assert state.launches == ()
    assert len(state.ends) == 1


@pytest.mark.parametrize(
    ("worker", "is_over"),
    [
        (Worker("w", "r:1", WorkerStatus.RUNNING, 101), True),
        (Worker("w", "r:1", WorkerStatus.RUNNING, 99), False),
        (Worker("w", "r:1", WorkerStatus.STARTING, 101), False),
        (Worker("w", "r:1", WorkerStatus.STOPPING, 101), False),
        (Worker("w", "r:1", WorkerStatus.RUNNING, None), False),
    ],
    ids=["new", "old", "starting", "stopping", "unknown"],
)
def test_a_worker_that_runs_since_then_ends_a_shortage(
    worker: Worker,
    is_over: bool,  # noqa: FBT001
) -> None:
    """One that waits for its machine proves nothing, nor does one that had its before."""
    short = back_off(FleetState(ends=(BAD,)), refusal(100))
    state = reset_backoff(short, [worker])
    assert state == (FleetState(ends=(BAD,)) if is_over else short)


def test_without_a_shortage_nothing_changes() -> None:
    """The number of running workers does not matter."""
    state = FleetState(ends=(BAD,))
    assert reset_backoff(state, [Worker("w", "r:1", WorkerStatus.RUNNING, 101)]) is state
