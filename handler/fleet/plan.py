"""What is to be done so that a fleet is as it is wanted. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from handler.batch.fleet import (
    START_REFUSED,
    FleetPlan,
    FleetState,
    Launch,
    Worker,
    WorkerStatus,
)

# Launchers list a worker some time after it was asked for.
LAUNCH_SECONDS = 120
# Each is a request of its own: so many at a look, the others at the next one.
MOST_STARTS = 100
# A start costs nothing where AWS refuses it.
REFUSED_SECONDS = 15 * 60


class Moves(NamedTuple):
    """How many workers to start, and which to stop."""

    num_starts: int = 0
    stops: tuple[Worker, ...] = ()


def is_held(state: FleetState, release: str, now: float) -> bool:
    """Say whether no worker of a release may be started now."""
    return is_braked(state, release, now) or now < state.not_before


def is_braked(state: FleetState, release: str, now: float) -> bool:
    """Say whether a brake holds the starts of a release.

    One that a refusal has set lets one start through now and then: what was mended may be a role or
    a quota, which makes no new release.
    """
    brake = state.brake
    if brake is None or brake.release != release:
        return False
    return brake.code != START_REFUSED or now < brake.at + REFUSED_SECONDS


def is_recent(launch: Launch, now: float) -> bool:
    """Say whether a list may not tell of a launch yet."""
    return now < launch.at + LAUNCH_SECONDS


def unlisted(launches: Sequence[Launch], workers: Sequence[Worker], now: float) -> list[Launch]:
    """Return the launches of which no list tells yet."""
    known = {worker.id for worker in workers}
    return [launch for launch in launches if launch.worker not in known and is_recent(launch, now)]


def plan_moves(
    workers: Sequence[Worker],
    launches: Sequence[Launch],
    wanted: int,
    plan: FleetPlan,
    *,
    now: float,
    replaces: bool = True,
) -> Moves:
    """Return what brings a fleet one step nearer to so many workers, all of the plan's release.

    `launches` are those that are not listed yet. Never are there more than `max_workers` at once,
    those that stop among them, and no worker is stopped but for one of the new release. Of these
    the first is started beside the old ones where there is room for it, and counts once it has run
    for `start_seconds`: a release that dies while it loads its model stops nobody. Then they are
    replaced one by one, unless `replaces` says otherwise.
    """
    alive = [worker for worker in workers if worker.status is not WorkerStatus.STOPPING]
    old = [worker for worker in alive if worker.release != plan.release]
    room = max(0, plan.max_workers - len(workers) - len(launches))
    missing = wanted - len(alive) - len(launches)
    if missing > 0:
        return Moves(min(missing, room, MOST_STARTS))
    new = [worker for worker in workers if worker not in old]
    is_settled = not launches and all(worker.status is WorkerStatus.RUNNING for worker in new)
    if not (replaces and old and wanted and is_settled):
        return Moves()
    if new and not any(_has_loaded(worker, plan, now) for worker in new):
        return Moves()
    has_new = len(alive) > len(old)
    if room and (len(alive) <= wanted or not has_new):
        return Moves(1)
    return Moves(0, (min(old, key=lambda worker: (worker.started_at or 0, worker.id)),))


def _has_loaded(worker: Worker, plan: FleetPlan, now: float) -> bool:
    return (worker.started_at or 0) + plan.start_seconds <= now
