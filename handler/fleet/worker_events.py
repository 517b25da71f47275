"""Worker events of ECS, SageMaker and the local cloud, parsed into ends of workers.

They are parsed leniently; an event that is not the end of our worker gives None. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidemill.batch.fleet import EndKind, FleetPlan, WorkerEnd

from .ecs import HUNG, EcsConfig, family_of, started_by
from .launcher import StartRefused
from .refusals import classify_refusal, is_shortage
from .sagemaker import jobs_prefix, release_of

# A stopped or idle worker exits with 0; one stopped before its signal handler is set, with 143.
_GOOD_EXITS: Final = frozenset({0, 143})
# SIGKILL, as shells report it; in a container this is mostly the out-of-memory killer.
_KILLED: Final = 137
# ECS's stop code of a task that ran no container.
_NEVER_STARTED: Final = "TaskFailedToStart"
# Errors of the ECS agent that an image, a role or a setting of the worker causes.
_BROKEN_START = re.compile(
    r"CannotPull|CannotCreate|CannotStart|CannotInspect|ContainerRuntime|ResourceInitialization"
)
_TIME_IS_UP: Final = "MaxRuntimeExceeded"
# Spot interruption or machine failure: not the worker's fault.
_INTERRUPTED = re.compile(
    r"SpotInterruption|TerminationNotice|InfrastructureHealth|MachineLost|Host EC2"
)
# A job's secondary status: `Stopped` on request, or its maximum run time.
_REQUESTED_STOPS: Final = frozenset(
    {"UserInitiated", "ServiceSchedulerInitiated", "Stopped", _TIME_IS_UP}
)
_JOB_ENDS: Final = frozenset({"Completed", "Failed", "Stopped"})
_EXIT_CODE = re.compile(r"exit ?code:? ?(\d+)", re.IGNORECASE)


class LogStream(NamedTuple):
    """Log stream of a worker in CloudWatch."""

    group: str
    stream: str


class EndEvent(NamedTuple):
    """End of a worker, and the log stream that explains it."""

    end: WorkerEnd
    log: LogStream | None = None


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Container(_Model):
    name: str = ""
    exit_code: int | None = Field(default=None, alias="exitCode")
    reason: str = ""


class _Task(_Model):
    arn: str = Field(alias="taskArn")
    definition: str = Field(alias="taskDefinitionArn")
    started_by: str = Field(default="", alias="startedBy")
    last_status: str = Field(alias="lastStatus")
    stop_code: str = Field(default="", alias="stopCode")
    reason: str = Field(default="", alias="stoppedReason")
    containers: tuple[_Container, ...] = ()


class _Job(_Model):
    name: str = Field(alias="TrainingJobName")
    status: str = Field(alias="TrainingJobStatus")
    secondary: str = Field(default="", alias="SecondaryStatus")
    reason: str = Field(default="", alias="FailureReason")


class _Process(_Model):
    model: str
    worker: str
    release: str
    stop_code: str = Field(alias="stopCode")
    reason: str = Field(default="", alias="stoppedReason")
    exit_code: int | None = Field(default=None, alias="exitCode")
    last_words: str | None = Field(default=None, alias="lastWords")


def parse_worker_end(
    event: Mapping[str, Any], plans: Mapping[str, FleetPlan], now: int
) -> EndEvent | None:
    """Return the end of a worker of one of these fleets in an event, or None."""
    read = _READERS.get(str(event.get("source")))
    if read is None:
        return None
    try:
        return read(event.get("detail"), plans, _time_of(event, now))
    except ValidationError:
        return None


def _read_task(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> EndEvent | None:
    task = _Task.model_validate(detail)
    plan = next((plan for plan in plans.values() if _is_task_of(plan, task)), None)
    if plan is None or task.last_status != "STOPPED":
        return None
    # A crashed container, if there is one, is the cause.
    ranked = sorted(task.containers, key=lambda each: each.exit_code in {None, *_GOOD_EXITS})
    container = ranked[0] if ranked else _Container()
    words = " ".join(filter(None, (task.reason, container.reason)))
    end = WorkerEnd(
        plan.model,
        task.arn,
        task.definition,
        at,
        classify_end(task.stop_code, container.exit_code, words),
        describe_end(container.exit_code, words),
        container.exit_code,
    )
    config = EcsConfig.model_validate(plan.means)
    if config.log_group is None:
        return EndEvent(end)
    stream = f"{config.log_prefix}/{container.name}/{task.arn.rpartition('/')[2]}"
    return EndEvent(end, LogStream(config.log_group, stream))


def _is_task_of(plan: FleetPlan, task: _Task) -> bool:
    if plan.launcher != "ecs" or task.started_by != started_by(plan.model):
        return False
    return family_of(EcsConfig.model_validate(plan.means).task_definition) == family_of(
        task.definition
    )


def _read_job(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> EndEvent | None:
    job = _Job.model_validate(detail)
    plan = next((plan for plan in plans.values() if _is_job_of(plan, job)), None)
    if plan is None or job.status not in _JOB_ENDS:
        return None
    exit_code = _exit_code_of(job)
    reason = job.reason or f"the job is {job.status}, {job.secondary}"
    # The reason also contains the last output of the worker.
    words = job.reason or None
    release = release_of(plan, job.name)
    kind = classify_end(job.secondary, exit_code, reason)
    return EndEvent(
        WorkerEnd(plan.model, job.name, release, at, kind, reason.rstrip(". "), exit_code, words)
    )


def _is_job_of(plan: FleetPlan, job: _Job) -> bool:
    return plan.launcher == "sagemaker" and job.name.startswith(jobs_prefix(plan))


def _exit_code_of(job: _Job) -> int | None:
    """Return the exit code of a job; None if it failed without one."""
    if job.status == "Completed":
        return 0
    return find_exit_code(job.reason)


def _read_process(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> EndEvent | None:
    process = _Process.model_validate(detail)
    if process.model not in plans:
        return None
    return EndEvent(
        WorkerEnd(
            process.model,
            process.worker,
            process.release,
            at,
            classify_end(process.stop_code, process.exit_code, process.reason),
            describe_end(process.exit_code, process.reason),
            process.exit_code,
            process.last_words,
        )
    )


_READERS: Final = {
    "aws.ecs": _read_task,
    "aws.sagemaker": _read_job,
    "tidemill.processes": _read_process,
}


def classify_end(stop_code: str, exit_code: int | None, words: str) -> EndKind:
    """Return the kind of an end; an end without a known harmless cause is a crash.

    A task that never started, for an unknown reason, is not a crash.
    """
    if _INTERRUPTED.search(f"{stop_code} {words}"):
        return EndKind.INTERRUPTED
    if HUNG in words:
        return EndKind.CRASHED
    if stop_code in _REQUESTED_STOPS or exit_code in _GOOD_EXITS:
        return EndKind.CLEAN
    if exit_code is None and is_shortage(f"{stop_code} {words}"):
        return EndKind.NO_CAPACITY
    if stop_code == _NEVER_STARTED and exit_code is None and not _BROKEN_START.search(words):
        is_ours = isinstance(classify_refusal(words), StartRefused)
        return EndKind.REFUSED if is_ours else EndKind.NOT_STARTED
    return EndKind.CRASHED


def find_exit_code(words: str) -> int | None:
    """Return the exit code in a message, or None."""
    found = _EXIT_CODE.search(words)
    return int(found[1]) if found else None


def describe_end(exit_code: int | None, words: str) -> str:
    """Return the reason of an end as a sentence, without a full stop."""
    if exit_code is None or HUNG in words:
        return words.rstrip(". ") or "it ended without a reported reason"
    if exit_code == _KILLED:
        return f"it was killed (exit status {exit_code}): {words.rstrip('. ')}"
    return f"it ended with exit status {exit_code}"


def _time_of(event: Mapping[str, Any], now: int) -> int:
    try:
        return int(datetime.fromisoformat(str(event.get("time"))).timestamp())
    except ValueError:
        return now
