"""Job status: workers and their ends, from the API server's state of Jobs and pods.

Parsed leniently. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from tidemill.batch.fleet import EndKind, Worker, WorkerEnd, WorkerStatus

from ..last_error import last_error
from ..worker_events import classify_end, describe_end, find_exit_code
from .job import CONTAINER, COUNTED_LABEL, DISRUPTED, RELEASE_LABEL

Manifest = Mapping[str, Any]
_ENDED: Final = ("Complete", "Failed")
# The Job's outcome is decided, but its pod may still run.
_ENDING: Final = ("FailureTarget", "SuccessCriteriaMet")
_JOB_NAME_LABELS: Final = ("batch.kubernetes.io/job-name", "job-name")
# A container in one of these states never starts, and holds its GPU in the meantime.
_BROKEN: Final = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
    }
)
# Time for a cluster to add nodes, or for a Job to create its first pod.
_PATIENCE_SECONDS: Final = 120


def name_of(job: Manifest) -> str:
    """Return the name of a Job."""
    return str(job["metadata"]["name"])


def pods_by_job(pods: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    """Return the pods of each Job by its name, the newest last."""
    found: dict[str, list[Manifest]] = {}
    for pod in sorted(pods, key=lambda it: str(it["metadata"].get("creationTimestamp"))):
        labels = pod["metadata"].get("labels") or {}
        owner = next((labels[name] for name in _JOB_NAME_LABELS if name in labels), None)
        if owner is not None:
            found.setdefault(owner, []).append(pod)
    return found


def worker_of(job: Manifest, pods: Sequence[Manifest]) -> Worker | None:
    """Return the worker of a Job; None for a Job that has ended."""
    if _condition(job, *_ENDED):
        return None
    started_at = _started_at(pods[-1]) if pods else None
    status = WorkerStatus.STARTING if started_at is None else WorkerStatus.RUNNING
    if job["metadata"].get("deletionTimestamp") or _condition(job, *_ENDING):
        status = WorkerStatus.STOPPING
    if started_at is None:
        started_at = _seconds(job["metadata"].get("creationTimestamp"))
    return Worker(name_of(job), _release(job), status, started_at)


def failed_end(model: str, job: Manifest, pods: Sequence[Manifest], now: int) -> WorkerEnd | None:
    """Return the end of a worker whose Job has failed and is not counted yet, or None."""
    failure = _condition(job, "Failed")
    if failure is None or COUNTED_LABEL in (job["metadata"].get("labels") or {}):
        return None
    pod = pods[-1] if pods else {}
    ended = _container_state(pod).get("terminated") or {}
    message = " ".join(filter(None, (failure.get("reason"), failure.get("message"))))
    exit_code = ended.get("exitCode")
    if exit_code is None:
        exit_code = find_exit_code(message)
    words = _reason_of(pod, ended) or message
    kind = classify_end("", exit_code, words)
    if _condition(pod, DISRUPTED):
        kind = EndKind.INTERRUPTED
    at = _seconds(ended.get("finishedAt")) or _seconds(failure.get("lastTransitionTime")) or now
    lines = str(ended.get("message") or "").splitlines()
    return WorkerEnd(
        model,
        name_of(job),
        _release(job),
        at,
        kind,
        describe_end(exit_code, words),
        exit_code,
        last_error(lines),
    )


def broken_start(model: str, job: Manifest, pods: Sequence[Manifest], now: int) -> WorkerEnd | None:
    """Return the end of a worker whose container can never start, for example without its image.

    Kubernetes would retry for ever.
    """
    if not pods or worker_of(job, pods) is None or job["metadata"].get("deletionTimestamp"):
        return None
    waiting = _container_state(pods[-1]).get("waiting") or {}
    reason = waiting.get("reason")
    if reason not in _BROKEN:
        return None
    message = ": ".join(filter(None, (reason, waiting.get("message"))))
    words = f"its container cannot start: {message}".rstrip(". ")
    return WorkerEnd(model, name_of(job), _release(job), now, EndKind.CRASHED, words)


def unscheduled(model: str, job: Manifest, pods: Sequence[Manifest], now: int) -> WorkerEnd | None:
    """Return the shortage that a Job without a running pod waits for, or None.

    The Job stays: Kubernetes has the queue.
    """
    worker = worker_of(job, pods)
    if worker is None or worker.status is not WorkerStatus.STARTING:
        return None
    if (job.get("spec") or {}).get("suspend"):
        reason = "its Job is suspended: Kueue has not admitted it yet"
    elif not pods:
        reason = f"its Job has no pod: see `kubectl describe job {worker.id}`"
    elif (found := _condition(pods[-1], "PodScheduled", status="False")) is not None:
        reason = str(found.get("message") or found.get("reason") or "its pod is not scheduled")
    else:
        return None
    if now < (worker.started_at or now) + _PATIENCE_SECONDS:
        return None
    return WorkerEnd(model, worker.id, worker.release, now, EndKind.NO_CAPACITY, reason)


def _release(job: Manifest) -> str:
    return str((job["metadata"].get("labels") or {}).get(RELEASE_LABEL, ""))


def _condition(thing: Manifest, *types: str, status: str = "True") -> Manifest | None:
    conditions: Sequence[Manifest] = (thing.get("status") or {}).get("conditions") or ()
    found = (it for it in conditions if it.get("type") in types and it.get("status") == status)
    return next(found, None)


def _container_state(pod: Manifest) -> Manifest:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((it.get("state") or {} for it in statuses if it.get("name") == CONTAINER), {})


def _started_at(pod: Manifest) -> int | None:
    return _seconds((_container_state(pod).get("running") or {}).get("startedAt"))


def _reason_of(pod: Manifest, ended: Manifest) -> str:
    """Return the reason of a container's end, or of its pod's: an eviction has only that."""
    status = pod.get("status") or {}
    known = (status.get("reason"), status.get("message"))
    return str(ended.get("reason") or " ".join(filter(None, known)))


def _seconds(text: Any) -> int | None:
    try:
        return int(datetime.fromisoformat(str(text)).timestamp())
    except ValueError:
        return None
