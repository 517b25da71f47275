"""ECS launcher: one task per worker, on a capacity provider that finds the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus

from ..aws.calls import Call, Operation
from ..errors import AwsError
from .launcher import NotStarted
from .names import digest, plain_name, tag_value
from .refusals import classify_refusal

_PAGE = 100
_STATUS: Final = {
    "RUNNING": WorkerStatus.RUNNING,
    "DEACTIVATING": WorkerStatus.STOPPING,
    "STOPPING": WorkerStatus.STOPPING,
    "DEPROVISIONING": WorkerStatus.STOPPING,
}
_ENDED = "STOPPED"
# The stop reason of a worker whose health check failed.
HUNG: Final = "it hung: its container health check failed"


class EcsConfig(BaseModel):
    """Launch configuration of ECS tasks; the release is the task definition.

    Without subnets the tasks use their machine's network. The container logs to
    `log_group`, in streams that begin with `log_prefix`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cluster: str
    task_definition: str
    capacity_provider: str
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    assign_public_ip: bool = False
    log_group: str | None = None
    log_prefix: str = ""


def started_by(model: str) -> str:
    """Return the `startedBy` value of a model's tasks."""
    return f"tidemill/{plain_name(model)}"


class EcsLauncher:
    """Launches workers as ECS tasks; a `launcher.Launcher`."""

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the tasks that have not stopped, stopping ones included."""
        config = EcsConfig.model_validate(plan.means)
        mark = started_by(plan.model)
        # ECS supports no other filter with `startedBy`, and it does not list stopping tasks.
        filters = {"family": family_of(config.task_definition), "desiredStatus": _ENDED}
        arns = yield from _list(config.cluster, {"startedBy": mark})
        arns += yield from _list(config.cluster, filters)
        return (yield from _workers(config.cluster, arns, mark))

    def list_workers_on(self, plan: FleetPlan, machine: str) -> Operation[list[Worker]]:
        """List the tasks on one machine, a container instance of ECS."""
        config = EcsConfig.model_validate(plan.means)
        arns = yield from _list(config.cluster, {"containerInstance": machine})
        return (yield from _workers(config.cluster, arns, started_by(plan.model)))

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Run one task; the client token contains `number`, so that a retry runs no second one."""
        config = EcsConfig.model_validate(plan.means)
        arguments: dict[str, Any] = {
            "cluster": config.cluster,
            "taskDefinition": config.task_definition,
            "count": 1,
            # The default weight is 0, and a provider of weight 0 places no task.
            "capacityProviderStrategy": [
                {"capacityProvider": config.capacity_provider, "weight": 1}
            ],
            "clientToken": f"{digest(f'{config.cluster} {plan.model}', 16)}-{number}",
            "startedBy": started_by(plan.model),
            "propagateTags": "TASK_DEFINITION",
            "tags": [{"key": "tidemill:model", "value": tag_value(plan.model)}],
            "enableECSManagedTags": True,
            **_network(config),
        }
        try:
            response = yield Call("ecs", "run_task", arguments)
        except AwsError as exc:
            if refusal := classify_refusal(str(exc), exc.aws_code):
                raise refusal from exc
            raise
        for task in response["tasks"]:
            arn: str = task["taskArn"]
            return arn
        message = _describe_failures(response.get("failures", ()))
        raise classify_refusal(message) or NotStarted(message)

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Stop a task: SIGTERM, and two minutes later SIGKILL."""
        config = EcsConfig.model_validate(plan.means)
        why = "Tidemill: this release is replaced, or its workers are stopped"
        if worker.status is WorkerStatus.HUNG:
            why = f"Tidemill: {HUNG}"
        yield Call(
            "ecs", "stop_task", {"cluster": config.cluster, "task": worker.id, "reason": why}
        )


def _workers(cluster: str, arns: Sequence[str], mark: str) -> Operation[list[Worker]]:
    """Return those of these tasks that carry the `startedBy` mark and have not ended."""
    tasks = yield from _describe(cluster, arns)
    return [
        _worker_of(task)
        for task in tasks
        if task.get("startedBy") == mark and task["lastStatus"] != _ENDED
    ]


def _network(config: EcsConfig) -> dict[str, Any]:
    if not config.subnets:
        return {}
    vpc: dict[str, Any] = {"subnets": list(config.subnets)}
    if config.security_groups:
        vpc["securityGroups"] = list(config.security_groups)
    if config.assign_public_ip:
        vpc["assignPublicIp"] = "ENABLED"
    return {"networkConfiguration": {"awsvpcConfiguration": vpc}}


def _list(cluster: str, filters: Mapping[str, str]) -> Operation[list[str]]:
    arguments: dict[str, Any] = {"cluster": cluster, "maxResults": _PAGE, **filters}
    found: list[str] = []
    while True:
        response = yield Call("ecs", "list_tasks", arguments)
        found += response["taskArns"]
        if not (token := response.get("nextToken")):
            return found
        arguments = {**arguments, "nextToken": token}


def _describe(cluster: str, arns: Sequence[str]) -> Operation[list[Mapping[str, Any]]]:
    """Return the tasks of these ARNs; ECS leaves out those that it has forgotten."""
    found: list[Mapping[str, Any]] = []
    wanted = list(dict.fromkeys(arns))
    for first in range(0, len(wanted), _PAGE):
        some = {"cluster": cluster, "tasks": wanted[first : first + _PAGE]}
        response = yield Call("ecs", "describe_tasks", some)
        found += response["tasks"]
    return found


def _worker_of(task: Mapping[str, Any]) -> Worker:
    status = _STATUS.get(task["lastStatus"], WorkerStatus.STARTING)
    if task.get("desiredStatus") == _ENDED:
        status = WorkerStatus.STOPPING
    elif status is WorkerStatus.RUNNING and task.get("healthStatus") == "UNHEALTHY":
        status = WorkerStatus.HUNG
    started = task.get("startedAt") or task.get("createdAt")
    started_at = None if started is None else int(started.timestamp())
    return Worker(task["taskArn"], task["taskDefinitionArn"], status, started_at)


def family_of(task_definition: str) -> str:
    """Return the family of a task definition, from its ARN or its name."""
    return task_definition.rpartition("/")[2].partition(":")[0]


def _describe_failures(failures: Sequence[Mapping[str, str]]) -> str:
    reasons = {each.get("reason", "") for each in failures}
    message = ", ".join(sorted(filter(None, reasons))) or "no reason given"
    return f"ECS started no task: {message}"
