"""Draining: stops the workers of a machine before a spot interruption takes it.

ECS stops the tasks of services when a container instance is draining, as after a Spot notice. It
leaves other tasks alone until the machine is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.batch.fleet import FleetPlan, WorkerStatus

from ..aws.calls import Operation
from ..observability import logger
from .ecs import EcsConfig, EcsLauncher

_EVENT: Final = "ECS Container Instance State Change"


class _Machine(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    arn: str = Field(alias="containerInstanceArn")
    cluster: str = Field(alias="clusterArn")
    status: str


def drain_machine(event: Mapping[str, Any], plans: Mapping[str, FleetPlan]) -> Operation[bool]:
    """Stop the workers of a draining machine; False where the event is about no such machine."""
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
        for worker in (yield from launcher.list_workers_on(plan, machine.arn)):
            if worker.status is not WorkerStatus.STOPPING:
                logger.info("worker leaves its machine", model=plan.model, worker=worker.id)
                yield from launcher.stop(plan, worker)
    return True


def _runs_in(plan: FleetPlan, cluster: str) -> bool:
    if plan.launcher != "ecs":
        return False
    return _name_of(EcsConfig.model_validate(plan.means).cluster) == _name_of(cluster)


def _name_of(cluster: str) -> str:
    return cluster.rpartition("/")[2]
