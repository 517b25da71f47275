"""Workers that come when there is work and go when there is none, through the real handlers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from localstack.cloud import Cloud
from localstack.fleet import LocalFleet
from tests.emulators import Emulator
from tidemill.batch.fleet import FleetPlan, FleetState, WorkerRate

MODEL = "scripted"
ENGINE = Path(__file__).parents[1] / "engine_process/scripted_engine.py"
SETTINGS = {
    "TIDEMILL_SHARD_LINES": "10",
    "TIDEMILL_LEASE_SECONDS": "4",
    "TIDEMILL_VISIBILITY_SECONDS": "4",
    "TIDEMILL_FLUSH_SECONDS": "0.3",
    "TIDEMILL_WAIT_SECONDS": "1",
    "TIDEMILL_GRACE_SECONDS": "0.5",
    "TIDEMILL_MAX_INFLIGHT": "4",
}
SECONDS = 60


@dataclass
class Mill:
    """A deployment without workers, and the machine on which they come and go."""

    cloud: Cloud
    fleet: LocalFleet
    notices: list[str]

    def release(
        self, name: str, *command: str, max_workers: int = 3, service_seconds: float = 0.2
    ) -> None:
        """Deploy workers of a scripted engine, or another command."""
        engine = [sys.executable, str(ENGINE), "--slots", "4"]
        engine += ["--service-seconds", str(service_seconds), "--stats-seconds", "0.5"]
        worker = [sys.executable, "-m", "tidemill", "worker", "--served-model-name", MODEL]
        worker += ["--exit-when-idle", "1"]
        plan = FleetPlan(MODEL, "processes", name, max_workers, target_seconds=1, start_seconds=1)
        variables = {"TIDEMILL_ENGINE_COMMAND": json.dumps(engine)}
        self.fleet.release(plan, *(command or worker), **variables)

    def state(self) -> FleetState:
        """Return what is remembered of the fleet."""
        return self.cloud.aws.run(self.cloud.deployment.fleets.get_state(MODEL))

    def put_rate(self) -> None:
        """Let it be known from earlier batches how fast a worker is."""
        pace = WorkerRate(rows_per_second=20.0)
        self.cloud.aws.run(self.cloud.deployment.fleets.put_rate(MODEL, pace))

    def change(self, change: Callable[[FleetState], FleetState]) -> None:
        """Change what is remembered."""
        self.cloud.aws.run(self.cloud.deployment.fleets.change(MODEL, change))

    def running(self) -> list[str]:
        """Return the releases of the workers that run, in order."""
        found = [worker for _, worker in self.fleet.workers() if worker.state == "running"]
        return sorted(worker.release for worker in found)

    def wait_until(self, holds: Callable[[], Any]) -> Any:
        """Return what holds as soon as it does."""
        deadline = time.monotonic() + SECONDS
        while not (found := holds()):
            assert time.monotonic() < deadline, (
                self.notices,
                self.cloud.read_log("lambdas")[-3000:],
            )
            time.sleep(0.2)
        return found

    def ends(self, name: str, count: int) -> None:
        """See a file through to its end: a row for every line, in order, once."""
        report = self.wait_until(lambda: self.cloud.report(name))
        assert report["status"] == "completed"
        rows = [row["custom_id"] for row in self.cloud.rows(name)]
        assert rows == [f"line-{number}" for number in range(1, count + 1)]
        self.wait_until(lambda: not self.fleet.workers())


@pytest.fixture
def mill(ministack: Emulator, tmp_path: Path) -> Iterator[Mill]:
    """Return a deployment whose reaper comes every second."""
    resources = ministack.create(MODEL, work_visibility_seconds=4)
    with ExitStack() as stack:
        cloud = stack.enter_context(Cloud(resources, ministack.environment | SETTINGS, tmp_path))
        cloud.start_lambdas("--reaper-seconds", "1")
        notices: list[str] = []
        fleet = cloud.fleet(notices.append)
        stack.enter_context(fleet.reconciling())
        yield Mill(cloud, fleet, notices)


def lines(count: int) -> bytes:
    """Return a file of that many requests."""
    requests = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
        }
        for number in range(1, count + 1)
    ]
    return "\n".join(map(json.dumps, requests)).encode()


def test_workers_come_with_work_and_go_without(mill: Mill) -> None:
    """They grow to three and shrink to none; a killed one is replaced, and no row is lost."""
    count = 300
    mill.put_rate()
    mill.release("r:1")
    assert mill.fleet.workers() == []
    mill.cloud.drop("x", lines(count))
    mill.wait_until(lambda: len(mill.running()) == 3)
    name = next(name for name in mill.cloud.processes if name.startswith("worker-"))
    mill.cloud.processes[name].kill()
    mill.wait_until(lambda: len(mill.running()) < 3)
    mill.wait_until(lambda: len(mill.running()) == 3)
    mill.ends("x", count)
    # Reported once the table has forgotten each.
    mill.wait_until(lambda: sum("there was no more work" in line for line in mill.notices) == 3)
    assert sum("killed by SIGKILL" in line for line in mill.notices) == 1


def test_workers_that_only_die_are_braked_until_another_release(mill: Mill) -> None:
    """The state has the reason, no more of them are started, and a good release runs the file."""
    mill.release("r:bad", sys.executable, "-c", "print('tidemill: no such dtype'); exit(1)")
    mill.cloud.drop("x", lines(20))
    breaker = mill.wait_until(lambda: mill.state().breaker)
    assert breaker.release == "r:bad"
    assert "no such dtype" in breaker.reason
    mill.wait_until(lambda: "reaped" in mill.cloud.read_log("lambdas").rpartition("brak")[2])
    assert sum("starts" in line for line in mill.notices) == 3
    mill.release("r:good", service_seconds=0.01)
    mill.ends("x", 20)


@pytest.mark.long
def test_a_deployment_replaces_workers_one_by_one(mill: Mill) -> None:
    """The batch goes on meanwhile: what an old worker leaves, another one takes up."""
    count = 300
    mill.put_rate()
    mill.release("r:1", max_workers=2)
    mill.cloud.drop("x", lines(count))
    mill.wait_until(lambda: mill.running() == ["r:1", "r:1"])
    mill.release("r:2", max_workers=2)
    seen: list[tuple[str, ...]] = []

    def is_replaced() -> bool:
        seen.append(tuple(mill.running()))
        return seen[-1] == ("r:2", "r:2")

    mill.wait_until(is_replaced)
    assert max(map(len, seen)) == 2
    assert ("r:1", "r:2") in seen
    assert min(map(len, seen)) >= 1, "both were stopped at once"
    mill.ends("x", count)
    mill.wait_until(lambda: sum("it was stopped" in line for line in mill.notices) == 2)


@pytest.mark.long
def test_a_machine_without_room_is_waited_for(mill: Mill) -> None:
    """The fleet reports the reason, and tries less often; when there is room the file is run."""
    mill.fleet.max_processes = 0
    mill.release("r:1")
    mill.cloud.drop("x", lines(20))
    refusal = mill.wait_until(lambda: mill.state().refusal)
    assert "room for 0 workers" in refusal
    assert mill.state().not_before >= time.time() + 30
    mill.fleet.max_processes = 1
    mill.change(lambda state: replace(state, not_before=0))  # a minute is over
    mill.ends("x", 20)
