"""Lists and stops the workers of a fleet, for operators and the reaper."""

from __future__ import annotations

from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus

from ..aws.calls import Operation
from ..deployment import Deployment
from ..observability import logger
from .launchers import launcher_for


def list_workers(deployment: Deployment, plan: FleetPlan) -> Operation[list[Worker]]:
    """List the workers of a fleet that have not ended."""
    return (yield from launcher_for(deployment, plan.launcher).list_workers(plan))


def stop_hung_workers(deployment: Deployment, plan: FleetPlan) -> Operation[None]:
    """Stop hung workers: ECS itself does that only for services."""
    launcher = launcher_for(deployment, plan.launcher)
    for worker in (yield from launcher.list_workers(plan)):
        if worker.status is WorkerStatus.HUNG:
            logger.error("worker hangs", model=plan.model, worker=worker.id)
            yield from launcher.stop(plan, worker)


def stop_workers(
    deployment: Deployment, plan: FleetPlan, release: str | None = None
) -> Operation[list[Worker]]:
    """Stop the workers of a release, or all; return them without waiting for their end.

    Open work starts new ones, unless the circuit breaker was opened first.
    """
    launcher = launcher_for(deployment, plan.launcher)
    found = yield from launcher.list_workers(plan)
    stopped = [
        worker
        for worker in found
        if worker.status is not WorkerStatus.STOPPING and release in {None, worker.release}
    ]
    for worker in stopped:
        yield from launcher.stop(plan, worker)
    return stopped
