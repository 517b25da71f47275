"""Workers that end badly are told; those that are stopped, idle or taken away are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.infra.compute.kinds import Compute

# In the form of ECS's guide.
STOPPED = json.loads(
    (Path(__file__).parents[2] / "events" / "ecs_task_stopped.json").read_text(encoding="utf-8")
)
CLUSTER = STOPPED["detail"]["clusterArn"]
SCALED_IN = "Scaling activity initiated by (deployment ecs-svc/1234567890123456789)"
UNHEALTHY = "Task failed container health checks"
PULLED = "CannotPullContainerError: pull image manifest has been retried 5 time(s)"


def stopped(code: int | None, stop_code: str, reason: str, **detail: Any) -> dict[str, Any]:
    """Return the event of a task that was stopped so; without a code it never ran."""
    [container] = STOPPED["detail"]["containers"]
    container = {key: value for key, value in container.items() if key != "exitCode"}
    if code is not None:
        container["exitCode"] = code
    told = {"containers": [container], "stopCode": stop_code, "stoppedReason": reason}
    return STOPPED | {"detail": STOPPED["detail"] | told | detail}


def rules(made: Compute) -> dict[str, dict[str, Any]]:
    """Return the rules for ends, with the cluster's address in place of its name."""
    text = json.dumps(made.of("AWS::Events::Rule")).replace("Cluster.Arn", CLUSTER)
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.parametrize(
    ("event", "told_by"),
    [
        (stopped(1, "EssentialContainerExited", "Essential container in task exited"), "Died"),
        (stopped(2, "EssentialContainerExited", "Essential container in task exited"), "Died"),
        (stopped(137, "EssentialContainerExited", "OutOfMemoryError"), "Died"),
        (stopped(139, "EssentialContainerExited", "Essential container in task exited"), "Died"),
        # It was still there two minutes after SIGTERM.
        (stopped(137, "ServiceSchedulerInitiated", SCALED_IN), "Died"),
        (stopped(None, "TaskFailedToStart", PULLED), "Unfit"),
        (stopped(0, "ServiceSchedulerInitiated", UNHEALTHY), "Unfit"),
        # What is as it should be.
        (stopped(0, "ServiceSchedulerInitiated", SCALED_IN), None),
        (stopped(143, "ServiceSchedulerInitiated", SCALED_IN), None),
        (stopped(0, "EssentialContainerExited", "Essential container in task exited"), None),
        (stopped(0, "UserInitiated", "Task stopped by user"), None),
        (stopped(0, "SpotInterruption", "Spot interruption"), None),
        (stopped(137, "SpotInterruption", "Spot interruption"), None),
        (stopped(137, "TerminationNotice", "Termination notice"), None),
        (stopped(None, "UserInitiated", "Host EC2 (instance i-1) terminated."), None),
        # Of others, or not over.
        (stopped(1, "EssentialContainerExited", "", clusterArn=f"{CLUSTER}-two"), None),
        (stopped(1, "EssentialContainerExited", "", lastStatus="DEPROVISIONING"), None),
    ],
)
def test_an_end_is_told_by_its_kind(
    ministack: Emulator, compute: dict[str, Compute], event: dict[str, Any], told_by: str | None
) -> None:
    """As EventBridge compares an event with what a rule asks for."""
    client = ministack.client("events")
    telling = [
        name.removeprefix("BadEnds")
        for name, rule in rules(compute["as it is"]).items()
        if client.test_event_pattern(
            EventPattern=json.dumps(rule["EventPattern"]), Event=json.dumps(event)
        )["Result"]
    ]
    assert telling == ([told_by] if told_by else [])


def test_people_are_told_what_and_why(any_kind: Compute) -> None:
    """The service, the exit status and ECS's reason; the topic is that of the alarms."""
    found = rules(any_kind)
    assert sorted(found) == ["BadEndsDied", "BadEndsUnfit"]
    for rule in found.values():
        assert rule["State"] == "ENABLED"
        (target,) = rule["Targets"]
        assert target["Arn"] == "EventsAlarms"
        said = target["InputTransformer"]["InputTemplate"]
        assert "<detail-group>" in said
        assert "<detail-stoppedReason>" in said
        assert "docs/operate.md" in said
    died = found["BadEndsDied"]["Targets"][0]["InputTransformer"]
    code = next(name for name, path in died["InputPathsMap"].items() if path.endswith("exitCode"))
    assert died["InputPathsMap"][code] == "$.detail.containers[0].exitCode"
    assert f"<{code}>" in died["InputTemplate"]
