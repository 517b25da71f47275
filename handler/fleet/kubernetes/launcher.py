"""Kubernetes launcher: one Job per worker, whose name contains the worker's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus

from ...aws.calls import Call, Operation
from ...errors import AwsError, NotThere
from ..launcher import NoCapacity, NotStarted, StartRefused
from .config import KubernetesConfig
from .job import job_manifest, job_name, selector
from .job_status import name_of, pods_by_job, worker_of

_PAGE: Final = 500
_MAX_ATTEMPTS: Final = 9
# Reasons in a Status of the API server.
_THERE: Final = "AlreadyExists"
_NO_QUOTA: Final = "exceeded quota"
_REFUSED: Final = frozenset({"BadRequest", "Forbidden", "Invalid", "NotFound"})
_DENIED: Final = "admission webhook"


class KubernetesLauncher:
    """Launches workers as Jobs; a `launcher.Launcher`."""

    def list_workers(self, plan: FleetPlan) -> Operation[list[Worker]]:
        """List the Jobs that have not ended."""
        jobs = yield from list_jobs(plan)
        pods = pods_by_job((yield from list_pods(plan)))
        found = (worker_of(job, pods.get(name_of(job), ())) for job in jobs)
        return [worker for worker in found if worker is not None]

    def start(self, plan: FleetPlan, number: int) -> Operation[str]:
        """Create one Job; its name contains `number`, so that a retry creates no second one.

        A Job of that name that has ended is not this worker: the next attempt gets a new name.
        """
        config = KubernetesConfig.model_validate(plan.means)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            name = job_name(plan, config, number, attempt)
            if (yield from _create(plan, config, name)) or (yield from _is_alive(plan, name)):
                return name
        raise NotStarted(f"the Jobs of worker {number}, up to {name}, have already ended")

    def stop(self, plan: FleetPlan, worker: Worker) -> Operation[None]:
        """Delete a Job: its pod gets SIGTERM, and two minutes later SIGKILL.

        The Job is listed, as stopping, until the pod is gone: its GPU is not free before.
        """
        config = KubernetesConfig.model_validate(plan.means)
        arguments = {
            "namespace": config.namespace,
            "name": worker.id,
            "propagation_policy": "Foreground",
        }
        try:
            yield Call("kubernetes", "delete_job", arguments)
        except NotThere:
            return


def _create(plan: FleetPlan, config: KubernetesConfig, name: str) -> Operation[bool]:
    """Create a Job; return False if its name is taken."""
    arguments = {"namespace": config.namespace, "manifest": job_manifest(plan, config, name)}
    try:
        yield Call("kubernetes", "create_job", arguments)
    except AwsError as exc:
        if exc.aws_code == _THERE:
            return False
        if refusal := classify_refused_job(str(exc), exc.aws_code):
            raise refusal from exc
        raise
    return True


def _is_alive(plan: FleetPlan, name: str) -> Operation[bool]:
    """Return whether a Job of the fleet has neither ended nor been deleted."""
    jobs = yield from list_jobs(plan)
    found = (worker_of(job, ()) for job in jobs if name_of(job) == name)
    return any(worker and worker.status is not WorkerStatus.STOPPING for worker in found)


def classify_refused_job(words: str, reason: str) -> NotStarted | None:
    """Return the error that a refused create of a Job means; None if unknown."""
    if _NO_QUOTA in words:
        return NoCapacity(words)
    if reason in _REFUSED or _DENIED in words:
        return StartRefused(words)
    return None


def list_jobs(plan: FleetPlan) -> Operation[list[Mapping[str, Any]]]:
    """Return all Jobs of a fleet, ended ones included."""
    return (yield from _list("list_jobs", plan))


def list_pods(plan: FleetPlan) -> Operation[list[Mapping[str, Any]]]:
    """Return all pods of a fleet."""
    return (yield from _list("list_pods", plan))


def _list(method: str, plan: FleetPlan) -> Operation[list[Mapping[str, Any]]]:
    config = KubernetesConfig.model_validate(plan.means)
    arguments: dict[str, Any] = {
        "namespace": config.namespace,
        "label_selector": selector(plan, config),
        "limit": _PAGE,
    }
    found: list[Mapping[str, Any]] = []
    while True:
        response = yield Call("kubernetes", method, arguments)
        found += response["items"]
        if not (token := (response.get("metadata") or {}).get("continue")):
            return found
        arguments = {**arguments, "continue_token": token}
