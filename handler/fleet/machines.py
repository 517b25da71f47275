"""Machines that go: workers on them are asked to end while there is time to hand over.

ECS stops what belongs to a service when a machine is drained, as at a Spot notice, and leaves other
tasks alone until the machine is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handler.aws.calls import Operation
from handler.batch.fleet import FleetPlan, WorkerStatus
from handler.fleet.ecs import EcsLauncher, EcsMeans
from handler.log import logger

_EVENT: Final = "ECS Container Instance State Change"


class _Machine(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    arn: str = Field(alias="containerInstanceArn")
    cluster: str = Field(alias="clusterArn")
    status: str


def leave_machine(event: Mapping[str, Any], plans: Mapping[str, FleetPlan]) -> Operation[bool]:
    """Ask the workers of a machine that is drained to end; False where the event is of none."""
    if event.get("detail-type") != _EVENT:
        return False
    try:
        machine = _Machine.model_validate(event.get("detail"))
    except ValidationError:
        return False
    if machine.status != "DRAINING":
        return False
    launcher = EcsLauncher()
    for plan in plans.values():
        if not _runs_in(plan, machine.cluster):
            continue
        for worker in (yield from launcher.running_on(plan, machine.arn)):
            if worker.status is not WorkerStatus.STOPPING:
                logger.info("worker leaves its machine", model=plan.model, worker=worker.id)
                yield from launcher.stop(plan, worker)
    return True


def _runs_in(plan: FleetPlan, cluster: str) -> bool:
    if plan.launcher != "ecs":
        return False
    return _name_of(EcsMeans.model_validate(plan.means).cluster) == _name_of(cluster)


def _name_of(cluster: str) -> str:
    return cluster.rpartition("/")[2]
