"""Starts and stops that bring a fleet to its desired state."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tidemill.batch.fleet import CircuitBreaker, FleetPlan, FleetState, Launch, Worker, WorkerStatus
from tidemill.handler.fleet.scale import (
    LAUNCH_SECONDS,
    MAX_STARTS,
    Actions,
    is_start_blocked,
    reconcile,
    unlisted,
)

PLAN = FleetPlan("m", "ecs", "r:2", max_workers=3)
NOW = 2 * PLAN.start_seconds
STARTING, RUNNING, STOPPING = (WorkerStatus(word) for word in ("starting", "running", "stopping"))


def fleet(*words: str) -> list[Worker]:
    """Return workers by their release and status, as in `1 running`."""
    return [
        Worker(f"w{number}", f"r:{word.split()[0]}", WorkerStatus(word.split()[1]), number)
        for number, word in enumerate(words)
    ]


@pytest.mark.parametrize(
    ("there", "num_launches", "wanted", "starts"),
    [
        ((), 0, 0, 0),
        ((), 0, 2, 2),
        ((), 0, 9, 3),
        ((), 2, 2, 0),
        ((), 1, 3, 2),
        (("2 running", "2 starting"), 0, 2, 0),
        (("2 running",), 1, 3, 1),
        (("2 running", "2 running", "2 running"), 0, 1, 0),
        (("2 stopping", "2 stopping"), 0, 3, 1),
        (("1 running",), 0, 3, 2),
    ],
)
def test_what_is_missing_is_started(
    there: tuple[str, ...], num_launches: int, wanted: int, starts: int
) -> None:
    """Workers that are not listed yet count, and the total never exceeds the maximum."""
    launches = [Launch(f"l{number}", "r:2", 0) for number in range(num_launches)]
    assert reconcile(fleet(*there), launches, wanted, PLAN, now=NOW) == Actions(starts)


@pytest.mark.parametrize(
    ("there", "wanted", "starts", "stops"),
    [
        # With room a new one is started first; only when it runs an old one goes.
        (("1 running", "1 running"), 2, 1, 0),
        (("1 running", "1 running", "2 starting"), 2, 0, 0),
        (("1 running", "1 running", "2 running"), 2, 0, 1),
        (("1 stopping", "1 running", "2 running"), 2, 0, 0),
        # Without room one goes first.
        (("1 running", "1 running", "1 running"), 3, 0, 1),
        (("1 stopping", "1 running", "1 running"), 3, 0, 0),
        (("2 starting", "1 running", "1 running"), 3, 0, 0),
        (("2 running", "1 running", "1 running"), 3, 0, 1),
        # Even where fewer would do, the first new one comes before any goes.
        (("1 running", "1 running"), 1, 1, 0),
        (("1 running", "1 running", "2 running"), 1, 0, 1),
        # An idle worker ends by itself.
        (("1 running",), 0, 0, 0),
    ],
)
def test_old_releases_are_replaced_one_by_one(
    there: tuple[str, ...], wanted: int, starts: int, stops: int
) -> None:
    """A batch in flight continues, and a broken release stops no worker if there is room."""
    moves = reconcile(fleet(*there), [], wanted, PLAN, now=NOW)
    assert (moves.num_starts, len(moves.stops)) == (starts, stops)
    assert all(worker.release == "r:1" for worker in moves.stops)


@pytest.mark.parametrize(
    ("there", "loaded_seconds", "stops"),
    [
        (("1 running", "1 running", "2 running"), -1, 0),
        (("1 running", "1 running", "2 running"), 0, 1),
        # The first has shown that the release loads: others need only run.
        (("2 running", "1 running", "2 running"), 0, 1),
    ],
)
def test_the_first_worker_of_a_release_counts_once_it_can_have_loaded(
    there: tuple[str, ...], loaded_seconds: int, stops: int
) -> None:
    """Its container runs minutes before its model does, and may die in them."""
    workers = fleet(*there)
    first = next(worker for worker in workers if worker.release == PLAN.release)
    now = (first.started_at or 0) + PLAN.start_seconds + loaded_seconds
    assert len(reconcile(workers, [], 2, PLAN, now=now).stops) == stops


def test_a_large_fleet_is_started_in_several_looks() -> None:
    """A Lambda has other models to see to, and its time."""
    plan = replace(PLAN, max_workers=1000)
    assert reconcile([], [], 250, plan, now=NOW) == Actions(MAX_STARTS)
    there = [Worker(f"w{number}", "r:2") for number in range(200)]
    assert reconcile(there, [], 250, plan, now=NOW) == Actions(50)


def test_a_run_that_sees_one_batch_replaces_no_worker() -> None:
    """A run for one batch does not know the demand of the others."""
    there = fleet("1 running", "1 running", "1 running")
    assert reconcile(there, [], 1, PLAN, now=NOW, replaces=False) == Actions()


def test_a_fleet_becomes_what_it_is_wanted_to_be() -> None:
    """From any start, it never exceeds the maximum, and never has no worker in between."""
    for seed in range(200):
        random = Random(seed)
        plan = replace(PLAN, max_workers=random.randint(1, 5))
        there = [
            Worker(f"o{n}", random.choice(["r:1", "r:2"]), random.choice(list(WorkerStatus)), n)
            for n in range(random.randint(0, plan.max_workers))
        ]
        wanted = random.randint(1, plan.max_workers)
        for step in range(40):
            moves = reconcile(there, [], wanted, plan, now=60 * step)
            there = [
                replace(worker, status=STOPPING if worker in moves.stops else after(worker.status))
                for worker in there
                if worker.status is not STOPPING
            ]
            there += [
                Worker(f"{step}.{n}", "r:2", STARTING, 60 * step) for n in range(moves.num_starts)
            ]
            assert len(there) <= plan.max_workers
        assert [worker.release for worker in there] == ["r:2"] * len(there)
        assert len(there) >= wanted


def after(status: WorkerStatus) -> WorkerStatus:
    """Return what a worker is a minute later: one that hangs is stopped whatever is planned."""
    if status is WorkerStatus.HUNG:
        return STOPPING
    return RUNNING if status is STARTING else status


def test_launches_count_until_they_are_listed_or_late() -> None:
    """A listed worker is no longer a launch; a launch that is never listed expires."""
    launches = [Launch("w0", "r:2", 100), Launch("w9", "r:2", 100), Launch("w8", "r:2", 50)]
    assert unlisted(launches, fleet("2 running"), 100) == launches[1:]
    assert unlisted(launches, fleet("2 running"), 50 + LAUNCH_SECONDS) == [launches[1]]
    assert unlisted(launches, [], 100 + LAUNCH_SECONDS) == []


def test_a_breaker_stops_its_release_only() -> None:
    """Another release may be the cure; a pause after a shortage stops all."""
    braked = FleetState(breaker=CircuitBreaker(1, "r:2", "crash_loop", "It dies.", "Mend it."))
    assert is_start_blocked(braked, "r:2", 5)
    assert not is_start_blocked(braked, "r:3", 5)
    assert is_start_blocked(FleetState(not_before=9), "r:2", 8)
    assert not is_start_blocked(FleetState(not_before=9), "r:2", 9)
