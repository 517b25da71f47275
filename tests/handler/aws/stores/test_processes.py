"""Requested and actual states of worker processes."""

from __future__ import annotations

from tests.handler.finalize.rig import Cloud
from tidemill.handler.aws.stores.processes import Process, process_id

REQUESTED = Process(process_id(7), "r:1", "asked", 100)


def test_a_process_is_requested_once(cloud: Cloud) -> None:
    """A repeated request, even with other values, finds it unchanged."""
    processes = cloud.deployment.processes
    assert cloud.run(processes.list_processes("m")) == []
    cloud.run(processes.ask("m", REQUESTED))
    cloud.run(processes.tell("m", REQUESTED.id, "running", 103))
    cloud.run(processes.ask("m", REQUESTED))
    assert cloud.run(processes.list_processes("m")) == [
        Process(REQUESTED.id, "r:1", "running", 103)
    ]
    assert cloud.run(processes.list_processes("other")) == []


def test_processes_are_listed_in_the_order_of_their_numbers(cloud: Cloud) -> None:
    """Numbers are times: ten digits for three centuries, and more if a process counts on."""
    processes = cloud.deployment.processes
    numbers = [10_000_000_000, 9, 1_800_000_000, 10]
    for number in numbers:
        cloud.run(processes.ask("m", Process(process_id(number), "r", "asked", 1)))
    found = [each.id for each in cloud.run(processes.list_processes("m"))]
    assert found == [process_id(number) for number in sorted(numbers)]


def test_an_ended_process_is_not_changed(cloud: Cloud) -> None:
    """A late message does not create the process again."""
    processes = cloud.deployment.processes
    cloud.run(processes.ask("m", REQUESTED))
    assert cloud.run(processes.tell("m", REQUESTED.id, "stopping", 1)) is True
    for _ in range(2):
        cloud.run(processes.forget("m", REQUESTED.id))
    assert cloud.run(processes.tell("m", REQUESTED.id, "stopping", 1)) is False
    assert cloud.run(processes.list_processes("m")) == []
