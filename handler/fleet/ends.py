"""What those who run workers tell of an end: events of ECS, SageMaker and a local cloud, as values.

Read leniently, by models of our own: what is no end of a worker of ours is None. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handler.batch.fleet import End, EndKind, FleetPlan
from handler.fleet.ecs import HUNG, EcsMeans, family_of, started_by
from handler.fleet.refusals import is_shortage
from handler.fleet.sagemaker import jobs_prefix, release_of

# A worker that is stopped, or idle, ends with 0; one that is stopped before it can hear that, 143.
_GOOD_EXITS: Final = frozenset({0, 143})
# As a shell tells of SIGKILL, which for a container means most often that memory was short.
_KILLED: Final = 137
_TIME_IS_UP: Final = "MaxRuntimeExceeded"
# The machine goes, or was never had: no fault of what runs on it.
_TAKEN = re.compile(r"SpotInterruption|TerminationNotice|InfrastructureHealth|MachineLost|Host EC2")
# Of a job, as its secondary status says: `Stopped` where somebody asked, and what its time is.
_ASKED: Final = frozenset({"UserInitiated", "ServiceSchedulerInitiated", "Stopped", _TIME_IS_UP})
_JOB_ENDS: Final = frozenset({"Completed", "Failed", "Stopped"})
_EXIT_CODE = re.compile(r"exit ?code:? ?(\d+)", re.IGNORECASE)


class LogPlace(NamedTuple):
    """Where the log of a worker is kept."""

    group: str
    stream: str


class Told(NamedTuple):
    """An end, and where more can be read of it."""

    end: End
    log: LogPlace | None = None


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


def read_end(event: Mapping[str, Any], plans: Mapping[str, FleetPlan], now: int) -> Told | None:
    """Return the end of a worker of one of these fleets that an event tells of, or None."""
    read = _READERS.get(str(event.get("source")))
    if read is None:
        return None
    try:
        return read(event.get("detail"), plans, _time_of(event, now))
    except ValidationError:
        return None


def _read_task(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> Told | None:
    task = _Task.model_validate(detail)
    plan = next((plan for plan in plans.values() if _is_task_of(plan, task)), None)
    if plan is None or task.last_status != "STOPPED":
        return None
    # The one that ended badly, if there is one, is why the task has.
    ranked = sorted(task.containers, key=lambda each: each.exit_code in {None, *_GOOD_EXITS})
    container = ranked[0] if ranked else _Container()
    words = " ".join(filter(None, (task.reason, container.reason)))
    end = End(
        plan.model,
        task.arn,
        task.definition,
        at,
        kind_of_end(task.stop_code, container.exit_code, words),
        reason_of_end(container.exit_code, words),
        container.exit_code,
    )
    means = EcsMeans.model_validate(plan.means)
    if means.log_group is None:
        return Told(end)
    stream = f"{means.log_prefix}/{container.name}/{task.arn.rpartition('/')[2]}"
    return Told(end, LogPlace(means.log_group, stream))


def _is_task_of(plan: FleetPlan, task: _Task) -> bool:
    if plan.launcher != "ecs" or task.started_by != started_by(plan.model):
        return False
    return family_of(EcsMeans.model_validate(plan.means).task_definition) == family_of(
        task.definition
    )


def _read_job(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> Told | None:
    job = _Job.model_validate(detail)
    plan = next((plan for plan in plans.values() if _is_job_of(plan, job)), None)
    if plan is None or job.status not in _JOB_ENDS:
        return None
    exit_code = _exit_code_of(job)
    reason = job.reason or f"the job is {job.status}, {job.secondary}"
    # What a worker wrote before it ended stands in the reason, too.
    words = job.reason or None
    release = release_of(plan, job.name)
    kind = kind_of_end(job.secondary, exit_code, reason)
    return Told(End(plan.model, job.name, release, at, kind, reason.rstrip(". "), exit_code, words))


def _is_job_of(plan: FleetPlan, job: _Job) -> bool:
    return plan.launcher == "sagemaker" and job.name.startswith(jobs_prefix(plan))


def _exit_code_of(job: _Job) -> int | None:
    """Return the exit code that a job tells; one that failed without one has none."""
    if job.status == "Completed":
        return 0
    found = _EXIT_CODE.search(job.reason)
    return int(found[1]) if found else None


def _read_process(detail: Any, plans: Mapping[str, FleetPlan], at: int) -> Told | None:
    process = _Process.model_validate(detail)
    if process.model not in plans:
        return None
    return Told(
        End(
            process.model,
            process.worker,
            process.release,
            at,
            kind_of_end(process.stop_code, process.exit_code, process.reason),
            reason_of_end(process.exit_code, process.reason),
            process.exit_code,
            process.last_words,
        )
    )


_READERS: Final = {
    "aws.ecs": _read_task,
    "aws.sagemaker": _read_job,
    "tidemill.processes": _read_process,
}


def kind_of_end(stop_code: str, exit_code: int | None, words: str) -> EndKind:
    """Return why a worker is no more; an end of which nobody knows anything good is a bad one."""
    if _TAKEN.search(f"{stop_code} {words}"):
        return EndKind.TAKEN
    if HUNG in words:
        return EndKind.BAD
    if stop_code in _ASKED or exit_code in _GOOD_EXITS:
        return EndKind.GOOD
    if exit_code is None and is_shortage(f"{stop_code} {words}"):
        return EndKind.NO_CAPACITY
    return EndKind.BAD


def reason_of_end(exit_code: int | None, words: str) -> str:
    """Return what is known of an end as a sentence, without a full stop."""
    if exit_code is None or HUNG in words:
        return words.rstrip(". ") or "it ended, and nobody says why"
    if exit_code == _KILLED:
        return f"it was killed (exit status {exit_code}): {words.rstrip('. ')}"
    return f"it ended with exit status {exit_code}"


def _time_of(event: Mapping[str, Any], now: int) -> int:
    try:
        return int(datetime.fromisoformat(str(event.get("time"))).timestamp())
    except ValueError:
        return now
