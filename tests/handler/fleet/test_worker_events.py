"""Events about the ends of workers: the reason, and the worker."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handler.fleet.given import (
    DEFINITION,
    NOW,
    PLANS,
    job_event,
    process_event,
    task_event,
)
from tidemill.batch.fleet import EndKind, WorkerEnd
from tidemill.handler.fleet.worker_events import EndEvent, LogStream, parse_worker_end

TASK = "arn:aws:ecs:eu-west-1:111122223333:task/tidemill/c13b4cb40f1f4fe4a2971f76ae5a47ad"
AT = 1_769_191_078


def parse_end(event: dict[str, Any]) -> EndEvent:
    """Return what an event is read as, which is an end."""
    found = parse_worker_end(event, PLANS, NOW)
    assert found is not None
    return found


def test_a_task_that_was_recorded() -> None:
    """Worker, release, time, exit code and log are those of the event."""
    assert parse_end(task_event()) == EndEvent(
        WorkerEnd("demo", TASK, DEFINITION, AT, EndKind.CRASHED, "it ended with exit status 1", 1),
        LogStream("logs", "worker/worker/c13b4cb40f1f4fe4a2971f76ae5a47ad"),
    )


def test_a_task_of_an_older_revision() -> None:
    """It is of the same fleet, and its release is its own."""
    older = DEFINITION.replace(":1", ":9")
    end = parse_end(task_event(taskDefinitionArn=older)).end
    assert (end.model, end.release) == ("demo", older)


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ({"containers": [{"exitCode": 0}]}, EndKind.CLEAN),
        ({"containers": [{"exitCode": 143}]}, EndKind.CLEAN),
        ({"stopCode": "UserInitiated", "containers": [{"exitCode": 137}]}, EndKind.CLEAN),
        ({"stopCode": "SpotInterruption"}, EndKind.INTERRUPTED),
        ({"stopCode": "TerminationNotice", "containers": [{}]}, EndKind.INTERRUPTED),
        (
            {"containers": [{}], "stoppedReason": "Host EC2 (instance i-0) terminated."},
            EndKind.INTERRUPTED,
        ),
        (
            {"stopCode": "TaskFailedToStart", "stoppedReason": "RESOURCE:GPU", "containers": [{}]},
            EndKind.NO_CAPACITY,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "Capacity is unavailable at this time. Please try again later",
                "containers": [],
            },
            EndKind.NO_CAPACITY,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "Timeout waiting for network interface provisioning to complete.",
                "containers": [{}],
            },
            EndKind.NO_CAPACITY,
        ),
        ({"containers": [{"exitCode": 137}]}, EndKind.CRASHED),
        ({"containers": [{"exitCode": 0}, {"exitCode": 1}]}, EndKind.CRASHED),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "CannotPullContainerError: pull image manifest has been retried",
                "containers": [{}],
            },
            EndKind.CRASHED,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "ResourceInitializationError: unable to pull secrets",
                "containers": [{}],
            },
            EndKind.CRASHED,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "TaskFailedToStart: EMPTY CAPACITY PROVIDER",
                "containers": [{}],
            },
            EndKind.REFUSED,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "Unexpected EC2 error while attempting to Create Network "
                "Interface in subnet 'subnet-1': InsufficientFreeAddressesInSubnet",
                "containers": [{}],
            },
            EndKind.NOT_STARTED,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "MemberOf placement constraint unsatisfied.",
                "containers": [],
            },
            EndKind.NOT_STARTED,
        ),
        (
            {
                "stopCode": "TaskFailedToStart",
                "stoppedReason": "Words of tomorrow",
                "containers": [{"exitCode": 1}],
            },
            EndKind.CRASHED,
        ),
        (
            {"stoppedReason": "Task failed container health checks", "containers": []},
            EndKind.CRASHED,
        ),
    ],
    ids=str,
)
def test_why_a_task_is_no_more(detail: dict[str, Any], kind: EndKind) -> None:
    """Unless it was idle, stopped, interrupted or never started, the end is its own fault."""
    assert parse_end(task_event(**detail)).end.kind is kind


@pytest.mark.parametrize(
    ("detail", "kind", "exit_code"),
    [
        ({}, EndKind.CRASHED, 1),
        ({"FailureReason": "AlgorithmError: , exit code: 137"}, EndKind.CRASHED, 137),
        ({"FailureReason": "InternalServerError: Please try again."}, EndKind.CRASHED, None),
        ({"FailureReason": "CapacityError: Unable to provision"}, EndKind.NO_CAPACITY, None),
        (
            {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxWaitTimeExceeded"},
            EndKind.NO_CAPACITY,
            None,
        ),
        ({"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}, EndKind.CLEAN, 0),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "Stopped"}, EndKind.CLEAN, None),
        (
            {"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"},
            EndKind.CLEAN,
            None,
        ),
    ],
    ids=str,
)
def test_why_a_job_is_no_more(detail: dict[str, Any], kind: EndKind, exit_code: int | None) -> None:
    """The exit code decides, if the reason contains one, else the status."""
    if detail.get("TrainingJobStatus") in {"Completed", "Stopped"}:
        detail = {"FailureReason": "", **detail}
    end = parse_end(job_event(**detail)).end
    assert (end.model, end.release) == ("jobs", "image:1")
    assert (end.kind, end.exit_code) == (kind, exit_code)


def test_a_jobs_last_output_is_reported() -> None:
    """SageMaker puts it into the reason."""
    assert "no kernel image" in (parse_end(job_event()).end.last_words or "")


def test_the_signal_that_killed_a_task_is_reported() -> None:
    """The container's own reason explains the exit status."""
    container = {"name": "worker", "exitCode": 137, "reason": "OutOfMemoryError: killed"}
    end = parse_end(task_event(containers=[container])).end
    assert "OutOfMemoryError" in end.reason
    assert "137" in end.reason


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ({"exitCode": 0, "stoppedReason": "there was no more work"}, EndKind.CLEAN),
        ({"stopCode": "UserInitiated", "exitCode": 143}, EndKind.CLEAN),
        ({"stopCode": "MachineLost", "exitCode": None}, EndKind.INTERRUPTED),
        ({"stopCode": "NoCapacity", "exitCode": None}, EndKind.NO_CAPACITY),
        ({"exitCode": 137, "stoppedReason": "killed by SIGKILL"}, EndKind.CRASHED),
        ({"exitCode": 2}, EndKind.CRASHED),
    ],
    ids=str,
)
def test_why_a_process_is_no_more(detail: dict[str, Any], kind: EndKind) -> None:
    """Processes of the local cloud are judged as tasks are."""
    assert parse_end(process_event(**detail)).end.kind is kind


@pytest.mark.parametrize(
    "event",
    [
        task_event(lastStatus="RUNNING"),
        task_event(taskDefinitionArn="arn:aws:ecs:x:1:task-definition/web:1"),
        task_event(taskArn=None),
        task_event(startedBy="ecs-svc/1"),
        job_event(TrainingJobStatus="InProgress"),
        job_event(TrainingJobName="a-foreign-job-1"),
        process_event(model="another"),
        {"source": "aws.ec2", "detail": {}},
        {"source": "aws.ecs"},
        {},
    ],
    ids=[
        "running",
        "another family",
        "no task",
        "another task",
        "job",
        "another job",
        "another model",
        "source",
        "no detail",
        "empty",
    ],
)
def test_other_events_are_not_ends(event: dict[str, Any]) -> None:
    """They are ignored without an error."""
    assert parse_worker_end(event, PLANS, NOW) is None


def test_an_event_without_a_time_is_of_now() -> None:
    """A clock of ours stands in for one that is missing or odd."""
    assert parse_end(process_event() | {"time": "yesterday"}).end.at == NOW


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(source=st.sampled_from(["aws.ecs", "aws.sagemaker", "tidemill.processes"]), detail=_values)
def test_whatever_comes_is_an_end_or_none(source: str, detail: object) -> None:
    """No event of any form raises."""
    parse_worker_end({"source": source, "detail": detail}, PLANS, NOW)
