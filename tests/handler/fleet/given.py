"""Plans and ends that tests of fleets begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.batch.fleet import EndKind, FleetPlan, WorkerEnd
from tidemill.handler.fleet.ecs import started_by
from tidemill.handler.fleet.sagemaker import SageMakerLauncher

EVENTS = Path(__file__).parents[2] / "events"
DEFINITION = "arn:aws:ecs:eu-west-1:111122223333:task-definition/tidemill:1"
NOW = 1_800_000_000

ECS = FleetPlan(
    "demo",
    "ecs",
    DEFINITION,
    means={
        "cluster": "tidemill",
        "task_definition": DEFINITION,
        "capacity_provider": "machines",
        "log_group": "logs",
        "log_prefix": "worker",
    },
)
SAGEMAKER = FleetPlan(
    "jobs",
    "sagemaker",
    "image:1",
    means={
        "image": "image",
        "role": "role",
        "instance_types": ["ml.g6.xlarge"],
        "output_uri": "s3://bucket/work/",
    },
)
LOCAL = FleetPlan("local", "processes", "r1")
PLANS = {plan.model: plan for plan in (ECS, SAGEMAKER, LOCAL)}


def task_event(**detail: Any) -> dict[str, Any]:
    """Return the recorded end of a task, as that of a worker of the first fleet."""
    return recorded("ecs_task_stopped", **{"startedBy": started_by("demo"), **detail})


def job_event(**detail: Any) -> dict[str, Any]:
    """Return the end of a job in the form of AWS's documents, of the second fleet."""
    calls = SageMakerLauncher().start(SAGEMAKER, 7)
    name = next(calls).arguments["TrainingJobName"]
    return recorded("sagemaker_job_failed", **{"TrainingJobName": name, **detail})


def recorded(name: str, **detail: Any) -> dict[str, Any]:
    """Return a recorded event with these fields of its detail changed."""
    event: dict[str, Any] = json.loads((EVENTS / f"{name}.json").read_text(encoding="utf-8"))
    event["detail"] |= detail
    return event


def process_event(**detail: Any) -> dict[str, Any]:
    """Return the local cloud's event about the end of a process."""
    known = {
        "model": "local",
        "worker": "7",
        "release": "r1",
        "stopCode": "ProcessExited",
        "stoppedReason": "exited with status 1",
        "exitCode": 1,
        "lastWords": None,
    }
    return {
        "source": "tidemill.processes",
        "detail-type": "Worker Process State Change",
        "time": "2026-01-23T17:57:58Z",
        "detail": known | detail,
    }


def end_of(worker: str, at: int = NOW, kind: EndKind = EndKind.CRASHED, **more: Any) -> WorkerEnd:
    """Return the end of a worker of the local fleet."""
    known = {"reason": "it ended with exit status 1", "exit_code": 1, "last_words": "no GPU"}
    return WorkerEnd("local", worker, "r1", at, kind, **known | more)
