"""What is wanted of processes, and what they are."""

from __future__ import annotations

from tests.handler.finalize.rig import Cloud
from tidemill.handler.aws.stores.processes import Process, process_id

ASKED = Process(process_id(7), "r:1", "asked", 100)


def test_a_process_is_asked_for_once(cloud: Cloud) -> None:
    """Whoever asks again, even in other words, finds it as it is."""
    processes = cloud.deployment.processes
    assert cloud.run(processes.list_processes("m")) == []
    cloud.run(processes.ask("m", ASKED))
    cloud.run(processes.tell("m", ASKED.id, "running", 103))
    cloud.run(processes.ask("m", ASKED))
    assert cloud.run(processes.list_processes("m")) == [Process(ASKED.id, "r:1", "running", 103)]
    assert cloud.run(processes.list_processes("other")) == []


def test_processes_are_listed_in_the_order_of_their_numbers(cloud: Cloud) -> None:
    """Numbers are times: ten digits for three centuries, and more where somebody counts on."""
    processes = cloud.deployment.processes
    numbers = [10_000_000_000, 9, 1_800_000_000, 10]
    for number in numbers:
        cloud.run(processes.ask("m", Process(process_id(number), "r", "asked", 1)))
    found = [each.id for each in cloud.run(processes.list_processes("m"))]
    assert found == [process_id(number) for number in sorted(numbers)]


def test_nothing_is_said_of_a_process_that_has_ended(cloud: Cloud) -> None:
    """A word that comes too late makes no process of it."""
    processes = cloud.deployment.processes
    cloud.run(processes.ask("m", ASKED))
    assert cloud.run(processes.tell("m", ASKED.id, "stopping", 1)) is True
    for _ in range(2):
        cloud.run(processes.forget("m", ASKED.id))
    assert cloud.run(processes.tell("m", ASKED.id, "stopping", 1)) is False
    assert cloud.run(processes.list_processes("m")) == []
