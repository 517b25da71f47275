"""Machine of a local cloud: processes follow the launcher's requests, and ends are reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localstack.fleet import LocalFleet
from localstack.processes import Processes
from tests.emulators import MODEL, Emulator, deployment_of
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.aws.parameters import FleetPlans
from tidemill.handler.aws.stores.processes import Process, ProcessState, ProcessStore
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment

FLEETS = "/fleets/test"
ENDS = "import sys; print('tidemill: no such dtype'); sys.exit({status})"
WAITS = "import time; time.sleep(60)"


@dataclass(frozen=True)
class Rig:
    """A fleet of one model on an emulator; the launcher's part is played by hand."""

    fleet: LocalFleet
    processes: Processes
    aws: Aws
    deployment: Deployment
    notices: list[str]

    @property
    def store(self) -> ProcessStore:
        """Return what the launcher writes to."""
        return ProcessStore(self.deployment.settings.table)

    def release(self, code: str, name: str = "r:1") -> None:
        """Let workers of a release run this code."""
        plan = FleetPlan(MODEL, "processes", name)
        self.fleet.release(plan, sys.executable, "-c", code)

    def ask(self, *workers: str, state: ProcessState = "asked", release: str = "r:1") -> None:
        """Write what the launcher writes of each."""
        for worker in workers:
            self.aws.run(self.store.ask(MODEL, Process(worker, release, state, 1)))

    def states(self) -> dict[str, str]:
        """Return the state of each worker that has not ended."""
        return {worker.id: worker.state for _, worker in self.fleet.workers()}

    def wait_for(self, worker: str) -> None:
        """Wait until the process of a worker has ended."""
        self.processes.processes[f"worker-{MODEL}-{worker[-1]}"].wait(120)

    def receive_ends(self) -> list[dict[str, Any]]:
        """Take the ends off the control queue, in the order of workers."""
        receive = self.deployment.control.receive(
            max_messages=10, wait_seconds=0, visibility_seconds=60
        )
        bodies = [json.loads(message.body) for message in self.aws.run(receive)]
        details = [body["detail"] for body in bodies if "detail" in body]
        return sorted(details, key=lambda detail: str(detail["worker"]))


@pytest.fixture
def rig(ministack: Emulator, tmp_path: Path) -> Iterator[Rig]:
    """Return a fleet without workers."""
    deployment, aws = deployment_of(ministack.create(), fleets=FLEETS), Aws(ministack.client)
    notices: list[str] = []
    with Processes({}, tmp_path) as processes:
        fleet = LocalFleet(processes, aws, deployment, notices.append)
        yield Rig(fleet, processes, aws, deployment, notices)


def test_a_requested_worker_runs_until_it_ends(rig: Rig) -> None:
    """Its end is reported with its exit status and its last error, and it is forgotten."""
    rig.release(ENDS.format(status=1))
    rig.ask("process-1")
    rig.fleet.reconcile()
    assert rig.states() == {"process-1": "running"}
    rig.wait_for("process-1")
    rig.fleet.reconcile()
    assert rig.states() == {}
    [end] = rig.receive_ends()
    assert end == {
        "model": MODEL,
        "worker": "process-1",
        "release": "r:1",
        "lastStatus": "STOPPED",
        "stopCode": "ProcessExited",
        "stoppedReason": "no such dtype",
        "exitCode": 1,
        "lastWords": "no such dtype",
    }
    assert rig.notices == [
        f"worker-{MODEL}-1 starts: there is work for {MODEL}",
        f"worker-{MODEL}-1 ended: no such dtype; none left for {MODEL}",
    ]
    rig.fleet.reconcile()
    assert rig.receive_ends() == []


def test_a_worker_that_is_to_stop_gets_sigterm(rig: Rig) -> None:
    """It gets it once and ends; a worker that had not begun never does."""
    rig.release(WAITS)
    rig.ask("process-1")
    rig.fleet.reconcile()
    rig.ask("process-2", state="stopping")
    rig.aws.run(rig.store.tell(MODEL, "process-1", "stopping", 2))
    rig.fleet.reconcile()
    rig.wait_for("process-1")
    rig.fleet.reconcile()
    assert [(end["worker"], end["stopCode"], end["exitCode"]) for end in rig.receive_ends()] == [
        ("process-1", "UserInitiated", 143),
        ("process-2", "UserInitiated", None),
    ]
    assert rig.states() == {}


def test_a_killed_worker_is_reported_like_a_killed_container(rig: Rig) -> None:
    """SIGKILL is 137; the reason is the signal, not what the log says of other things."""
    rig.release(WAITS)
    rig.ask("process-1")
    rig.fleet.reconcile()
    rig.processes.processes[f"worker-{MODEL}-1"].kill()
    rig.wait_for("process-1")
    rig.fleet.reconcile()
    [end] = rig.receive_ends()
    assert (end["exitCode"], end["stoppedReason"]) == (137, "killed by SIGKILL")


def test_workers_of_a_cloud_that_is_no_more_have_ended(rig: Rig) -> None:
    """Saved state contains them: they are reported as lost with their machine."""
    rig.release(WAITS, "r:2")
    rig.ask("process-1", state="running", release="r:2")
    rig.ask("process-2", release="r:1")
    rig.fleet.reconcile()
    assert [end["stopCode"] for end in rig.receive_ends()] == ["MachineLost", "MachineLost"]
    assert rig.states() == {}


def test_a_worker_without_room_ends_for_lack_of_capacity(rig: Rig) -> None:
    """The next requested one has the room of one that has ended."""
    rig.release(WAITS)
    rig.fleet.max_processes = 1
    rig.ask("process-1", "process-2")
    rig.fleet.reconcile()
    assert rig.states() == {"process-1": "running"}
    [end] = rig.receive_ends()
    assert (end["worker"], end["stopCode"]) == ("process-2", "NoCapacity")
    rig.processes.processes[f"worker-{MODEL}-1"].kill()
    rig.wait_for("process-1")
    rig.ask("process-3")
    rig.fleet.reconcile()
    assert rig.states() == {"process-3": "running"}


def test_a_release_is_what_the_launcher_reads(rig: Rig) -> None:
    """The plan is stored below the deployment's path, and a newer one replaces it."""
    for name in ("r:1", "r:2"):
        rig.release(WAITS, name)
    plans = rig.aws.run(FleetPlans(FLEETS).read())
    assert plans == {MODEL: FleetPlan(MODEL, "processes", "r:2")}


def test_each_worker_is_of_its_release(rig: Rig) -> None:
    """A worker requested before a deployment is started with the old release."""
    rig.release("import os; print('one', os.environ['TIDEMILL_WORKER'])")
    rig.ask("process-1")
    rig.release("import os; print('two', os.environ['TIDEMILL_WORKER'])", "r:2")
    rig.ask("process-2", release="r:2")
    rig.fleet.reconcile()
    for worker in ("process-1", "process-2"):
        rig.wait_for(worker)
    logs = [rig.processes.read_log(f"worker-{MODEL}-{number}") for number in (1, 2)]
    assert logs == ["one process-1\n", "two process-2\n"]
