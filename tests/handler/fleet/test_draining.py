"""Workers of an ending machine are stopped, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.handler.fleet.given import ECS, LOCAL, process_event, task_event
from tests.handler.fleet.services import Services
from tidemill.batch.fleet import FleetPlan, WorkerStatus
from tidemill.handler.fleet.ecs import EcsLauncher
from tidemill.handler.fleet.worker_ended import drain_machine

CLUSTER = "arn:aws:ecs:eu-west-1:111122223333:cluster/tidemill"
MACHINE = "arn:aws:ecs:eu-west-1:111122223333:container-instance/tidemill/9d5be76c1cde"
OTHER = replace(ECS, model="other")
PLANS = {plan.model: plan for plan in (ECS, OTHER, LOCAL)}


def event(**detail: Any) -> dict[str, Any]:
    """Return ECS's event about a machine at a Spot notice, in the format of AWS's documents."""
    known = {
        "agentConnected": True,
        "clusterArn": CLUSTER,
        "containerInstanceArn": MACHINE,
        "ec2InstanceId": "i-0b1b1b1b1b1b1b1b1",
        "status": "DRAINING",
    }
    return {
        "source": "aws.ecs",
        "detail-type": "ECS Container Instance State Change",
        "detail": known | detail,
    }


def running(services: Services, plan: FleetPlan, number: int, machine: str) -> str:
    """Return a task that runs on a machine."""
    arn = services.run(EcsLauncher().start(plan, number))
    services.tasks[arn] |= {"lastStatus": "RUNNING", "containerInstanceArn": machine}
    return arn


def stopping(services: Services) -> set[str]:
    """Return the tasks that were stopped."""
    return {
        worker.id
        for plan in (ECS, OTHER)
        for worker in services.run(EcsLauncher().list_workers(plan))
        if worker.status is WorkerStatus.STOPPING
    }


def test_all_workers_of_the_machine_are_stopped() -> None:
    """Workers of every model are stopped, once; those of other machines continue."""
    services = Services()
    gone = {running(services, plan, 1, MACHINE) for plan in (ECS, OTHER)}
    running(services, ECS, 2, f"{MACHINE}0")
    for _ in range(2):
        assert services.run(drain_machine(event(), PLANS))
    assert stopping(services) == gone
    assert [call.method for call in services.calls].count("stop_task") == 2


@pytest.mark.parametrize(
    "changes",
    [
        event(status="ACTIVE"),
        event(containerInstanceArn=None),
        task_event(),
        process_event(),
        {},
    ],
    ids=["active", "no machine", "task", "process", "empty"],
)
def test_other_events_stop_no_worker(changes: Mapping[str, Any]) -> None:
    """They are left to the handler of ends."""
    services = Services()
    running(services, ECS, 1, MACHINE)
    assert not services.run(drain_machine(changes, PLANS))
    assert stopping(services) == set()


def test_another_cluster_is_nobodys() -> None:
    """Its tasks are not even listed."""
    services = Services()
    assert services.run(drain_machine(event(clusterArn=f"{CLUSTER}-2"), PLANS))
    assert services.calls == []
