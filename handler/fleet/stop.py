"""The workers of a fleet, seen and stopped by those who look after a deployment."""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.batch.fleet import FleetPlan, Worker, WorkerStatus
from handler.deployment import Deployment
from handler.fleet.launchers import launcher_of
from handler.log import logger


def running(deployment: Deployment, plan: FleetPlan) -> Operation[list[Worker]]:
    """Return the workers of a fleet that have not ended."""
    return (yield from launcher_of(deployment, plan.launcher).running(plan))


def stop_hung(deployment: Deployment, plan: FleetPlan) -> Operation[None]:
    """Ask workers that hang to end: ECS does that for services alone."""
    launcher = launcher_of(deployment, plan.launcher)
    for worker in (yield from launcher.running(plan)):
        if worker.status is WorkerStatus.HUNG:
            logger.error("worker hangs", model=plan.model, worker=worker.id)
            yield from launcher.stop(plan, worker)


def stop(
    deployment: Deployment, plan: FleetPlan, release: str | None = None
) -> Operation[list[Worker]]:
    """Ask the workers of a release to end, or all; return them. Waits for none of them.

    Whoever has open work starts others, unless a brake is set first.
    """
    launcher = launcher_of(deployment, plan.launcher)
    found = yield from launcher.running(plan)
    stopped = [
        worker
        for worker in found
        if worker.status is not WorkerStatus.STOPPING and release in {None, worker.release}
    ]
    for worker in stopped:
        yield from launcher.stop(plan, worker)
    return stopped
