"""Worker ends, from the event on the control queue to the fleet's circuit breaker."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.emulators import Emulator, deployment_of
from tests.handler.finalize.rig import Cloud, plenty
from tests.handler.fleet.given import LOCAL, process_event
from tidemill.batch.fleet import FleetState, WorkerRate
from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.aws.parameters import plan_text
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.circuit_breaker import CRASHES_TO_TRIP
from tidemill.handler.fleet.last_error import read_last_error
from tidemill.handler.fleet.launchers import ProcessLauncher
from tidemill.handler.fleet.worker_events import LogStream
from tidemill.handler.lambdas.control import handle_message

PLACE = LogStream("logs", "worker/worker/1")


def answered(operation: Operation[Any], *answers: Any) -> tuple[list[Call], Any]:
    """Return what an operation calls when it is answered like this, and what it returns."""
    calls = []
    try:
        calls.append(next(operation))
        for answer in answers:
            is_error = isinstance(answer, Exception)
            calls.append(operation.throw(answer) if is_error else operation.send(answer))
    except StopIteration as stop:
        return calls, stop.value
    raise AssertionError(calls)


def log_of(*messages: str) -> dict[str, Any]:
    """Return lines of a log as CloudWatch does."""
    return {"events": [{"message": message} for message in messages]}


def event(level: str, message: str, **more: str) -> str:
    """Return a line that a worker logs."""
    return json.dumps({"level": level, "message": message, **more})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([event("ERROR", "engine died", reason="SIGSEGV")], "engine died: SIGSEGV"),
        ([event("ERROR", "one"), event("CRITICAL", "two"), event("INFO", "figures")], "two"),
        ([event("ERROR", "one"), "tidemill: there is no queue"], "there is no queue"),
        ([event("ERROR", "x" * 9999)], "x" * 500),
    ],
    ids=["reason", "last", "command", "long"],
)
def test_the_last_complaint_counts(lines: list[str], words: str) -> None:
    """The last error of the log, or of a command's own message, counts, with its reason."""
    calls, found = answered(read_last_error(PLACE), log_of(*lines))
    assert found == words
    assert [call.method for call in calls] == ["get_log_events"]
    assert calls[0].arguments["logStreamName"] == PLACE.stream


def test_a_late_log_is_read_again() -> None:
    """It is read once more, after a few seconds."""
    quiet = log_of(event("INFO", "claimed"), "[1, 2]", "no JSON")
    calls, found = answered(read_last_error(PLACE), quiet, log_of(event("ERROR", "late")))
    assert found == "late"
    assert [call.delay_seconds > 0 for call in calls] == [False, True]
    assert answered(read_last_error(PLACE), quiet, quiet)[1] is None


def test_an_unreadable_log_is_not_an_error() -> None:
    """The end counts, without a last error."""
    assert answered(read_last_error(PLACE), AwsError("no such stream"))[1] is None


@pytest.fixture
def fleet(ministack: Emulator) -> Cloud:
    """Return a deployment whose local fleet has a plan."""
    cloud = Cloud.on(ministack)
    path = f"/{cloud.resources.table}"
    cloud = Cloud(
        ministack, cloud.aws, deployment_of(cloud.resources, fleets=path), cloud.resources
    )
    parameter = {"Name": f"{path}/local", "Value": plan_text(LOCAL), "Type": "String"}
    cloud.aws.clients["ssm"].put_parameter(**parameter)
    return cloud


def tell(cloud: Cloud, number: int, **detail: Any) -> FleetState:
    """Hand the end of a worker to the Lambda on the control queue, and return what is left."""
    now = datetime.now(UTC).isoformat()
    body = json.dumps(process_event(worker=f"w{number}", **detail) | {"time": now})
    handle_message(cloud.aws, cloud.deployment, body, plenty)
    state: FleetState = cloud.run(cloud.deployment.fleets.get_state("local"))
    return state


def test_a_loop_of_events_opens_the_breaker(fleet: Cloud) -> None:
    """Each message is counted by itself, and a repeated one is not."""
    for number in (0, 0, 0, *range(CRASHES_TO_TRIP - 1)):
        assert tell(fleet, number).breaker is None
    breaker = tell(fleet, CRASHES_TO_TRIP, lastWords="no kernel image").breaker
    assert breaker is not None
    assert "no kernel image" in breaker.reason


def test_rows_of_the_release_before_forgive_nothing(fleet: Cloud) -> None:
    """A deployment that cannot run is braked while what it shall replace gets on."""
    deployment = fleet.deployment
    for number, release in ((1, "r0"), (2, "r1")):
        old = ProcessLauncher(deployment.processes)
        name = fleet.run(old.start(replace(LOCAL, release=release), number))
        fleet.run(deployment.processes.tell("local", name, "running", 1))
    fleet.run(deployment.fleets.put_rate("local", WorkerRate(rows_at=2**33)))
    for number in range(CRASHES_TO_TRIP):
        assert tell(fleet, number).breaker is None
    fleet.run(deployment.processes.forget("local", name))
    for number in range(CRASHES_TO_TRIP, 2 * CRASHES_TO_TRIP - 1):
        tell(fleet, number)
    assert tell(fleet, 2 * CRASHES_TO_TRIP).breaker is not None


def test_a_task_too_large_for_an_empty_machine_is_a_refused_start(fleet: Cloud) -> None:
    """The same words while another worker runs mean that its machine is full."""
    deployment, launcher = fleet.deployment, ProcessLauncher(fleet.deployment.processes)
    name = fleet.run(launcher.start(LOCAL, 1))
    fleet.run(deployment.processes.tell("local", name, "running", 1))
    words = {"stopCode": "TaskFailedToStart", "stoppedReason": "RESOURCE:GPU", "exitCode": None}
    assert tell(fleet, 7, **words).breaker is None
    fleet.run(deployment.processes.forget("local", name))
    breaker = tell(fleet, 8, **words).breaker
    assert breaker is not None
    assert breaker.code == "start_refused"


def test_events_of_no_worker_change_nothing(fleet: Cloud) -> None:
    """Events of other tasks, and of workers that ended well, leave the fleet unchanged."""
    assert tell(fleet, 1, model="another") == FleetState()
    assert tell(fleet, 2, exitCode=0) == FleetState()
