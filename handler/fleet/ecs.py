"""Workers as tasks of ECS: one `RunTask` each, on a capacity provider that finds the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from handler.aws.calls import Call, Operation
from handler.batch.fleet import FleetPlan, Worker, WorkerStatus
from handler.errors import AwsError
from handler.fleet.launcher import NotStarted
from handler.fleet.names import digest, plain_name, tag_value
from handler.fleet.refusals import refusal_of

_PAGE = 100
_STATUS: Final = {
    "RUNNING": WorkerStatus.RUNNING,
    "DEACTIVATING": WorkerStatus.STOPPING,
    "STOPPING": WorkerStatus.STOPPING,
    "DEPROVISIONING": WorkerStatus.STOPPING,
}
_ENDED = "STOPPED"
# Of a stop that the worker is the cause of.
HUNG: Final = "it hung, as its health check has told"


class EcsMeans(BaseModel):
    """Where the tasks of a fleet run; the release is that of the task definition.

    Without subnets the task definition's network is that of its machine. Its container logs to
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
    """Return by what the tasks of a model are known."""
    return f"tidemill/{plain_name(model)}"


class EcsLauncher:
    """A `launcher.Launcher`."""

    def running(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """Return the tasks that have not stopped, those that are about to among them."""
        means = EcsMeans.model_validate(plan.means)
        mark = started_by(plan.model)
        # ECS takes no filter beside `startedBy`, and lists by it no task that is told to stop.
        told = {"family": family_of(means.task_definition), "desiredStatus": _ENDED}
        arns = yield from _list(means.cluster, {"startedBy": mark})
        arns += yield from _list(means.cluster, told)
        return (yield from _workers(means.cluster, arns, mark))

    def running_on(self, plan: FleetPlan, machine: str) -> Operation[list[Worker]]:
        """Return the tasks on one machine, a container instance of ECS."""
        means = EcsMeans.model_validate(plan.means)
        arns = yield from _list(means.cluster, {"containerInstance": machine})
        return (yield from _workers(means.cluster, arns, started_by(plan.model)))

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Run one task; its client token is of this number, so that it is run once."""
        means = EcsMeans.model_validate(plan.means)
        arguments: dict[str, Any] = {
            "cluster": means.cluster,
            "taskDefinition": means.task_definition,
            "count": 1,
            # Without a weight it is 0, and a provider of weight 0 places no task.
            "capacityProviderStrategy": [
                {"capacityProvider": means.capacity_provider, "weight": 1}
            ],
            "clientToken": f"{digest(f'{means.cluster} {plan.model}', 16)}-{number}",
            "startedBy": started_by(plan.model),
            "propagateTags": "TASK_DEFINITION",
            "tags": [{"key": "tidemill:model", "value": tag_value(plan.model)}],
            "enableECSManagedTags": True,
            **_network(means),
        }
        try:
            response = yield Call("ecs", "run_task", arguments)
        except AwsError as exc:
            if refusal := refusal_of(str(exc), exc.aws_code):
                raise refusal from exc
            raise
        for task in response["tasks"]:
            arn: str = task["taskArn"]
            return arn
        said = _said(response.get("failures", ()))
        raise refusal_of(said) or NotStarted(said)

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Stop a task: SIGTERM, and two minutes later SIGKILL."""
        means = EcsMeans.model_validate(plan.means)
        why = "Tidemill: this release is replaced, or its workers are to end"
        if worker.status is WorkerStatus.HUNG:
            why = f"Tidemill: {HUNG}"
        yield Call("ecs", "stop_task", {"cluster": means.cluster, "task": worker.id, "reason": why})


def _workers(cluster: str, arns: Sequence[str], mark: str) -> Operation[list[Worker]]:
    """Return those of these tasks that are known by a mark and have not ended."""
    tasks = yield from _describe(cluster, arns)
    return [
        _worker_of(task)
        for task in tasks
        if task.get("startedBy") == mark and task["lastStatus"] != _ENDED
    ]


def _network(means: EcsMeans) -> dict[str, Any]:
    if not means.subnets:
        return {}
    vpc: dict[str, Any] = {"subnets": list(means.subnets)}
    if means.security_groups:
        vpc["securityGroups"] = list(means.security_groups)
    if means.assign_public_ip:
        vpc["assignPublicIp"] = "ENABLED"
    return {"networkConfiguration": {"awsvpcConfiguration": vpc}}


def _list(cluster: str, told: Mapping[str, str]) -> Operation[list[str]]:
    arguments: dict[str, Any] = {"cluster": cluster, "maxResults": _PAGE, **told}
    found: list[str] = []
    while True:
        response = yield Call("ecs", "list_tasks", arguments)
        found += response["taskArns"]
        if not (token := response.get("nextToken")):
            return found
        arguments = {**arguments, "nextToken": token}


def _describe(cluster: str, arns: Sequence[str]) -> Operation[list[Mapping[str, Any]]]:
    """Return the tasks of these names; of those that are forgotten meanwhile nothing is told."""
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
    begun = task.get("startedAt") or task.get("createdAt")
    started_at = None if begun is None else int(begun.timestamp())
    return Worker(task["taskArn"], task["taskDefinitionArn"], status, started_at)


def family_of(task_definition: str) -> str:
    """Return what all revisions of a task definition have in common, of its ARN or its name."""
    return task_definition.rpartition("/")[2].partition(":")[0]


def _said(failures: Sequence[Mapping[str, str]]) -> str:
    reasons = {each.get("reason", "") for each in failures}
    said = ", ".join(sorted(filter(None, reasons))) or "no reason given"
    return f"ECS runs no task: {said}"
