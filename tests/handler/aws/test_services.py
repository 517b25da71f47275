"""The services that run workers: looked at, and asked for a first task."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from handler.aws.services import WorkerService
from handler.errors import AwsError, NotThere
from tests.emulators import Emulator
from tests.handler.aws.conftest import Run


@pytest.fixture(scope="module")
def ecs(emulator: Emulator) -> Any:
    """Return a client of ECS with a cluster `mill`."""
    client = emulator.client("ecs")
    client.create_cluster(clusterName="mill")
    client.register_task_definition(
        family="worker", containerDefinitions=[{"name": "worker", "image": "i", "memory": 128}]
    )
    return client


def service_of(ecs: Any, desired_count: int) -> str:
    """Return the name of a new service that wants so many tasks."""
    name = f"mill-{uuid4().hex}"
    ecs.create_service(
        cluster="mill", serviceName=name, taskDefinition="worker", desiredCount=desired_count
    )
    return name


def desired_count(ecs: Any, name: str) -> int:
    """Return how many tasks a service wants."""
    [found] = ecs.describe_services(cluster="mill", services=[name])["services"]
    count: int = found["desiredCount"]
    return count


def test_a_service_without_tasks_gets_one(run: Run, ecs: Any) -> None:
    """Woken again it is left alone."""
    name = service_of(ecs, 0)
    service = WorkerService(f"mill/{name}")
    assert [run(service.wake()), run(service.wake())] == [True, False]
    assert desired_count(ecs, name) == 1


def test_a_service_with_tasks_keeps_them(run: Run, ecs: Any) -> None:
    """The number that scaling has set is never lowered."""
    name = service_of(ecs, 3)
    assert run(WorkerService(f"mill/{name}").wake()) is False
    assert desired_count(ecs, name) == 3


def test_a_service_that_was_deleted_is_not_there(run: Run, ecs: Any) -> None:
    """Nor is one that never was; a cluster that is not there is an error, too."""
    name = service_of(ecs, 0)
    ecs.delete_service(cluster="mill", service=name)
    for path in (f"mill/{name}", "mill/never"):
        with pytest.raises(NotThere):
            run(WorkerService(path).wake())
    with pytest.raises(AwsError):
        run(WorkerService("elsewhere/mill-x").wake())
