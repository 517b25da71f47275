"""Ends of workers and of machines are sent to the control queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.infra.compute.kinds import Compute
from tidemill.handler.fleet.ecs import started_by
from tidemill.handler.fleet.worker_events import parse_worker_end
from tidemill.handler.intake.control_messages import WorkerEvent, parse_control

# In the form of ECS's guide.
STOPPED = json.loads(
    (Path(__file__).parents[2] / "events" / "ecs_task_stopped.json").read_text(encoding="utf-8")
)
CLUSTER = STOPPED["detail"]["clusterArn"]


def stopped(**detail: Any) -> dict[str, Any]:
    """Return the event of a task that has stopped, with some things otherwise."""
    return STOPPED | {"detail": STOPPED["detail"] | detail}


def rules_of(made: Compute) -> list[dict[str, Any]]:
    """Return the rules for ends, with the cluster's address in place of its name."""
    text = json.dumps(list(made.of("AWS::Events::Rule").values())).replace("Cluster.Arn", CLUSTER)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def machine(status: str, cluster: str = CLUSTER) -> dict[str, Any]:
    """Return the event of a machine of a cluster."""
    return STOPPED | {
        "detail-type": "ECS Container Instance State Change",
        "detail": {
            "containerInstanceArn": f"{cluster}/machine",
            "clusterArn": cluster,
            "status": status,
        },
    }


@pytest.mark.parametrize(
    ("event", "is_sent"),
    [
        (stopped(), True),
        (stopped(stopCode="SpotInterruption"), True),
        (stopped(stopCode="TaskFailedToStart", containers=[]), True),
        (stopped(clusterArn=f"{CLUSTER}-two"), False),
        (stopped(lastStatus="DEPROVISIONING"), False),
        (machine("DRAINING"), True),
        (machine("ACTIVE"), False),
        (machine("DRAINING", f"{CLUSTER}-two"), False),
    ],
)
def test_an_end_in_this_cluster_is_sent(
    ministack: Emulator, compute: dict[str, Compute], event: dict[str, Any], *, is_sent: bool
) -> None:
    """Rules match events as EventBridge does; the circuit breaker interprets them."""
    client = ministack.client("events")
    telling = [
        rule["Name"]
        for rule in rules_of(compute["as it is"])
        if client.test_event_pattern(
            EventPattern=json.dumps(rule["EventPattern"]), Event=json.dumps(event)
        )["Result"]
    ]
    assert len(telling) == is_sent


def test_the_event_comes_to_the_control_queue_as_it_is(any_kind: Compute) -> None:
    """The handler reads the end of a worker of the model from it."""
    for rule in rules_of(any_kind):
        [target] = rule["Targets"]
        assert target["Arn"] == "DoorbellsControl.Arn"
        assert not {"Input", "InputPath", "InputTransformer"} & set(target)
        assert rule["State"] == "ENABLED"
    for plan in any_kind.plans().values():
        definition = f"arn:aws:ecs:eu-west-1:1:task-definition/{plan.means['task_definition']}:3"
        event = stopped(taskDefinitionArn=definition, startedBy=started_by(plan.model))
        [request] = parse_control(json.dumps(event))
        assert isinstance(request, WorkerEvent)
        end = parse_worker_end(request.event, any_kind.plans(), now=1)
        assert end is not None
        assert end.end.model == plan.model


def test_only_rules_of_this_deployment_ring_for_ends(any_kind: Compute) -> None:
    """The queue's one policy knows them by their name, and by the account."""
    [statement] = [
        found
        for found in any_kind.resource_statements("AWS::SQS::QueuePolicy", "DoorbellsControl")
        if found["Principal"] == {"Service": "events.amazonaws.com"}
    ]
    assert (statement["Action"], statement["Resource"]) == (
        "sqs:SendMessage",
        "DoorbellsControl.Arn",
    )
    assert statement["Condition"] == {
        "StringEquals": {"aws:SourceAccount": "111122223333"},
        "ArnLike": {"aws:SourceArn": "arn:aws:events:eu-west-1:111122223333:rule/tidemill-*"},
    }
    assert {rule["Name"] for rule in rules_of(any_kind)} == {
        "tidemill-ends-1",
        "tidemill-ends-2",
    }
