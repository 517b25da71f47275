"""Stored state of fleets: no update is lost."""

from __future__ import annotations

from dataclasses import replace

from tests.handler.finalize.rig import Cloud
from tidemill.batch.fleet import CircuitBreaker, EndKind, FleetState, Launch, WorkerEnd, WorkerRate
from tidemill.handler.aws.items import dump, load

END = WorkerEnd("m", "w", "r:1", 1, EndKind.CRASHED, "It died.", 1, "out of memory")
FULL = FleetState(
    last_number=2,
    launches=(Launch("w", "r:1", 1),),
    ends=(END,),
    breaker=CircuitBreaker(1, "r:1", "crash_loop", "It dies.", "Mend it."),
    not_before=9,
    refusal="no quota",
)


def test_a_state_is_what_was_put(cloud: Cloud) -> None:
    """Every field comes back, and of a fleet that never was an empty one."""
    assert cloud.run(cloud.deployment.fleets.get_state("m")) == FleetState()
    cloud.run(cloud.deployment.fleets.change("m", lambda _: FULL))
    assert cloud.run(cloud.deployment.fleets.get_state("m")) == FULL


def test_a_breaker_keeps_the_attribute_of_earlier_versions() -> None:
    """Tables that were written before are read after."""
    assert dump(FULL)["brake"]["code"] == "crash_loop"
    assert load(FleetState, dump(FULL)) == FULL


def test_changes_that_meet_are_both_made(cloud: Cloud) -> None:
    """A writer that finds a state other than the one it read starts again."""
    fleets, seen = cloud.deployment.fleets, []

    def start(state: FleetState) -> FleetState:
        if not seen:  # another writer comes between reading and writing
            seen.append(state)
            cloud.run(fleets.change("m", lambda _: FleetState(last_number=5)))
        return replace(state, last_number=state.last_number + 1)

    assert cloud.run(fleets.change("m", start)).last_number == 6


def test_a_pace_is_the_last_one_reported(cloud: Cloud) -> None:
    """A worker's measurement replaces that of another."""
    fleets = cloud.deployment.fleets
    assert cloud.run(fleets.get_rate("m")) == WorkerRate()
    for rows in (1.0, 2.5):
        cloud.run(fleets.put_rate("m", WorkerRate(7, rows, 10.0)))
    assert cloud.run(fleets.get_rate("m")) == WorkerRate(7, 2.5, 10.0)
    cloud.run(fleets.put_rate("m", WorkerRate(9)))  # rows, and not yet enough of them for a rate
    assert cloud.run(fleets.get_rate("m")) == WorkerRate(9, 2.5, 10.0)


def test_as_many_stay_ready_as_there_are_places(cloud: Cloud) -> None:
    """An owner keeps its place; a place that was not renewed in time goes to the next one."""

    def keeps(owner: str, now: int) -> bool:
        fleets = cloud.deployment.fleets
        return bool(cloud.run(fleets.keep_ready("m", 2, owner, now=now, until=now + 100)))

    assert keeps("a", 0)
    assert keeps("b", 10)
    assert not keeps("c", 20)
    assert keeps("b", 90)
    assert keeps("c", 101)
    assert not keeps("a", 102)
    assert keeps("b", 150)
