"""Reconcile: the starts and stops that bring a fleet to its demand. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidemill.batch.fleet import (
    START_REFUSED,
    FleetPlan,
    FleetState,
    Launch,
    Worker,
    WorkerStatus,
)

# Launchers list a worker some time after its start was requested.
LAUNCH_SECONDS = 120
# Each start is a request of its own; the rest follow at the next run of the reaper.
MAX_STARTS = 100
# A refused start costs nothing: a half-open breaker lets one through this often.
HALF_OPEN_SECONDS = 15 * 60


class Actions(NamedTuple):
    """Number of workers to start, and the workers to stop."""

    num_starts: int = 0
    stops: tuple[Worker, ...] = ()


def is_start_blocked(state: FleetState, release: str, now: float) -> bool:
    """Say whether starts of a release are blocked, by the breaker or by backoff."""
    return is_breaker_open(state, release, now) or now < state.not_before


def is_breaker_open(state: FleetState, release: str, now: float) -> bool:
    """Say whether an open circuit breaker blocks the starts of a release.

    One that a refusal opened is half-open every HALF_OPEN_SECONDS and lets a start through: a
    fixed role or quota makes no new release.
    """
    breaker = state.breaker
    if breaker is None or breaker.release != release:
        return False
    return breaker.code != START_REFUSED or now < breaker.at + HALF_OPEN_SECONDS


def is_recent(launch: Launch, now: float) -> bool:
    """Say whether a launch may still be missing from the launcher's list."""
    return now < launch.at + LAUNCH_SECONDS


def unlisted(launches: Sequence[Launch], workers: Sequence[Worker], now: float) -> list[Launch]:
    """Return the launches that the launcher does not list yet."""
    known = {worker.id for worker in workers}
    return [launch for launch in launches if launch.worker not in known and is_recent(launch, now)]


def reconcile(
    workers: Sequence[Worker],
    launches: Sequence[Launch],
    demand: int,
    plan: FleetPlan,
    *,
    now: float,
    replaces: bool = True,
) -> Actions:
    """Return the actions that bring a fleet one step nearer to the demand, on the plan's release.

    `launches` are those not listed yet. There are never more than `max_workers` at once, stopping
    ones included. A worker is stopped only to be replaced by one of the new release (a rolling
    update): the first new worker starts beside the old ones where there is room, and counts once
    it has run for `start_seconds`, so that a release that dies while loading stops nobody. Then
    old workers are replaced one by one, unless `replaces` is False.
    """
    alive = [worker for worker in workers if worker.status is not WorkerStatus.STOPPING]
    old = [worker for worker in alive if worker.release != plan.release]
    room = max(0, plan.max_workers - len(workers) - len(launches))
    missing = demand - len(alive) - len(launches)
    if missing > 0:
        return Actions(min(missing, room, MAX_STARTS))
    new = [worker for worker in workers if worker not in old]
    is_settled = not launches and all(worker.status is WorkerStatus.RUNNING for worker in new)
    if not (replaces and old and demand and is_settled):
        return Actions()
    if new and not any(_has_loaded(worker, plan, now) for worker in new):
        return Actions()
    has_new = len(alive) > len(old)
    if room and (len(alive) <= demand or not has_new):
        return Actions(1)
    return Actions(0, (min(old, key=lambda worker: (worker.started_at or 0, worker.id)),))


def _has_loaded(worker: Worker, plan: FleetPlan, now: float) -> bool:
    return (worker.started_at or 0) + plan.start_seconds <= now
