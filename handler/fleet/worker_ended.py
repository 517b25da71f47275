"""Worker ended: counts the end of a worker towards the circuit breaker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.batch.fleet import EndKind, FleetPlan, WorkerEnd, WorkerRate, WorkerStatus

from ..aws.calls import Operation
from ..deployment import Deployment
from ..observability import logger
from .circuit_breaker import count_end, may_have_rows
from .ecs import EcsConfig, EcsLauncher
from .last_error import read_last_error
from .refusals import exceeds_machines
from .stop import list_workers
from .worker_events import parse_worker_end

_EVENT: Final = "ECS Container Instance State Change"


class _Machine(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    arn: str = Field(alias="containerInstanceArn")
    cluster: str = Field(alias="clusterArn")
    status: str


def drain_machine(event: Mapping[str, Any], plans: Mapping[str, FleetPlan]) -> Operation[bool]:
    """Stop the workers of a draining machine; False if the event is not about one."""
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
                logger.info(
                    "worker stopped on draining machine", model=plan.model, worker=worker.id
                )
                yield from launcher.stop(plan, worker)
    return True


def _runs_in(plan: FleetPlan, cluster: str) -> bool:
    if plan.launcher != "ecs":
        return False
    return _name_of(EcsConfig.model_validate(plan.means).cluster) == _name_of(cluster)


def _name_of(cluster: str) -> str:
    return cluster.rpartition("/")[2]


def handle_worker_event(
    deployment: Deployment, event: Mapping[str, Any], now: int
) -> Operation[None]:
    """Count the worker end in an event; an event without one is logged and dropped.

    Workers on a draining machine are stopped.
    """
    plans = yield from deployment.fleet_plans.read()
    if (yield from drain_machine(event, plans)):
        return
    ended = parse_worker_end(event, plans, now)
    if ended is None:
        logger.info("event dropped", reason="not the end of a worker of this deployment")
        return
    end = ended.end
    if end.kind is EndKind.CRASHED and end.last_words is None and ended.log is not None:
        end = replace(end, last_words=(yield from read_last_error(ended.log)))
    yield from count_worker_end(deployment, plans[end.model], end, now)


def count_worker_end(
    deployment: Deployment, plan: FleetPlan, end: WorkerEnd, now: int
) -> Operation[None]:
    """Log the end of a worker of a plan's fleet, and count it; idempotent."""
    log = logger.error if end.kind is EndKind.CRASHED else logger.info
    log(
        "worker ended",
        model=end.model,
        worker=end.worker,
        release=end.release,
        kind=str(end.kind),
        reason=end.reason,
        last_words=end.last_words,
    )
    rate = yield from deployment.fleets.get_rate(end.model)
    if end.kind is EndKind.NO_CAPACITY and exceeds_machines(end.reason, ()):
        workers = yield from list_workers(deployment, plan)
        if exceeds_machines(end.reason, workers):
            end = replace(end, kind=EndKind.REFUSED)
    if end.kind is EndKind.CRASHED:
        workers = yield from list_workers(deployment, plan)
        if not may_have_rows(workers, plan.release):
            rate = WorkerRate()  # the rows came from the release that this one replaces
    count = partial(count_end, end=end, plan=plan, rate=rate, now=now)
    state = yield from deployment.fleets.change(end.model, count)
    if state.breaker is not None and state.breaker.at == now:
        logger.error("no more workers are started", model=end.model, reason=state.breaker.reason)
