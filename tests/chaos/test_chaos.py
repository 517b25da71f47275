"""Whatever happens to processes, messages and answers of AWS: every line gets its row, once.

`make test` runs none and `make test-all` three; `TIDEMILL_CHAOS_SEEDS=all` runs twenty, `=7,11`
those. Workers have two engines each where the seed is even.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localstack.cloud import Cloud
from localstack.ministack import environment_for
from localstack.resources import create_resources
from tests.chaos.evidence import (
    computed_although_kept,
    lost_without_reason,
    most_parts_of_a_claim,
    overlooked,
    read_journal,
    read_log,
)
from tests.chaos.faults import Faults
from tests.chaos.rig import read_counts, running_proxy
from tests.emulators import Emulator, active_ids, deployment_of
from tidemill.batch.fleet import FleetPlan, WorkerRate
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError

NUM_LINES, SHARD_LINES, NUM_SHARDS = 1000, 80, 13
NUM_WORKERS = 3
HARM_SECONDS, AGAIN_SECONDS = 8, 1
LEASE_SECONDS = 3
LOST_SECONDS = 10
FAULT_RATE = 0.02
MODEL = "scripted"
ENGINE = Path(__file__).parents[1] / "engine_process/scripted_engine.py"
SETTINGS = {
    "TIDEMILL_SHARD_LINES": str(SHARD_LINES),
    "TIDEMILL_LEASE_SECONDS": str(LEASE_SECONDS),
    "TIDEMILL_FLUSH_SECONDS": "0.5",
    "TIDEMILL_VISIBILITY_SECONDS": "4",
    "TIDEMILL_WAIT_SECONDS": "1",
    "TIDEMILL_GRACE_SECONDS": "1",
    "TIDEMILL_MAX_INFLIGHT": "16",
    # Workers are killed on purpose here, and no shard is to blame for it.
    "TIDEMILL_MAX_ATTEMPTS": "1000",
}


def chosen_seeds() -> list[Any]:
    """Return the seeds that the environment requests."""
    requested = os.environ.get("TIDEMILL_CHAOS_SEEDS")
    if requested is None:
        return [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
    return (
        list(range(1, 21)) if requested == "all" else [int(seed) for seed in requested.split(",")]
    )


def request_lines() -> bytes:
    """Return the file: every fiftieth request fails, so that there are two outputs.

    Prompts that begin alike are far from each other, so that shards run in one order. It is short
    enough to be taken in at once.
    """
    lines = []
    for number in range(1, NUM_LINES + 1):
        name = f"line-{number}"
        body = {"model": MODEL, "custom_id": name, "temperature": 0}
        body |= {"prompt": f"{number % 90}, " * 150} if number % 3 == 0 else {}
        body |= {"status": 400} if number % 50 == 0 else {}
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


class ChaosCloud:
    """A pump, and the workers that come and go by themselves, three at most."""

    def __init__(self, cloud: Cloud, num_engines: int) -> None:
        self.cloud = cloud
        self.num_engines = num_engines
        self.fleet = cloud.fleet(print)
        self.num_brakes = 0

    def release(self) -> None:
        """Let workers be started; each has a separate journal."""
        engine = [sys.executable, str(ENGINE), "--log", f"{self.cloud.folder}/$TIDEMILL_WORKER"]
        engine += ["--slots", "8", "--service-seconds", "0.2", "--stats-seconds", "0.5"]
        worker = [sys.executable, "-m", "tidemill", "worker", "--served-model-name", MODEL]
        worker += ["--exit-when-idle", "2", "--reuse", "-dp", str(self.num_engines)]
        plan = FleetPlan(MODEL, "processes", "r:1", NUM_WORKERS, target_seconds=1, start_seconds=1)
        self.fleet.release(plan, *worker, TIDEMILL_ENGINE_COMMAND=json.dumps(engine))
        # As reported by earlier batches: else there is one worker until its pace is known.
        pace = WorkerRate(rows_per_second=40.0)
        self.cloud.aws.run(self.cloud.deployment.fleets.put_rate(MODEL, pace))

    def mend(self) -> None:
        """Restart the pump, and close the breaker like a person who knows why workers die."""
        lambdas = self.cloud.processes.get("lambdas")
        if lambdas is None or lambdas.poll() is not None:
            self.cloud.start_lambdas("--reaper-seconds", "2")
        fleets, aws = self.cloud.deployment.fleets, self.cloud.aws
        with suppress(AwsError):
            if aws.run(fleets.get_state(MODEL)).breaker is not None:
                self.num_brakes += 1
                aws.run(fleets.change(MODEL, lambda state: replace(state, breaker=None, ends=())))

    def names(self) -> list[str]:
        """Return the names of all workers that there have been."""
        return sorted(path.stem for path in self.cloud.folder.glob("worker-*.log"))

    def journal_of(self, name: str) -> Path:
        """Return where the engine of a worker notes what it computes."""
        return self.cloud.folder / name.rpartition("-")[2]


def wait_for_batch(cloud: Cloud, aws: Aws, deployment: Deployment) -> str:
    """Return the id of the batch that the drop has made, once it runs."""
    deadline = time.monotonic() + 180  # a message whose receipt was lost comes again after 25 s
    while time.monotonic() < deadline:
        for batch_id in aws.run(active_ids(deployment.table)):
            batch = aws.run(deployment.table.get_batch(batch_id))
            if batch is not None and batch.num_shards:
                assert batch.num_shards == NUM_SHARDS
                return batch.id
        time.sleep(0.1)
    raise AssertionError(cloud.read_log("lambdas"))


def wait_until_idle(chaos: ChaosCloud, name: str, seconds: float) -> dict[str, Any]:
    """Return the report of a drop, once the last worker has ended by itself."""
    deadline = time.monotonic() + seconds
    while (report := chaos.cloud.report(name)) is None or chaos.fleet.workers():
        assert time.monotonic() < deadline, ("no report", chaos.fleet.workers())[report is not None]
        chaos.mend()
        time.sleep(0.2)
    return report


@pytest.mark.parametrize("seed", chosen_seeds())
def test_every_line_gets_its_row_once_and_in_order(
    seed: int, ministack: Emulator, tmp_path: Path
) -> None:
    """Workers that come and go under kills, freezes, repeated messages, and AWS failing."""
    sys.stdout.write(f"replay with TIDEMILL_CHAOS_SEEDS={seed}\n")
    resources = create_resources(
        ministack.endpoint_url,
        prefix=f"chaos-{seed}-{os.getpid()}",
        models=[MODEL],
        control_visibility_seconds=25,
        work_visibility_seconds=4,
    )
    aws, deployment = Aws(ministack.client), deployment_of(resources)
    with (
        running_proxy(ministack, tmp_path / "proxy", seed, FAULT_RATE) as url,
        Cloud(resources, environment_for(url) | SETTINGS, tmp_path) as cloud,
        ExitStack() as running,
    ):
        chaos = ChaosCloud(
            cloud, num_engines=1 if seed % 2 else min(2, len(os.sched_getaffinity(0)))
        )
        chaos.release()
        chaos.mend()
        running.enter_context(chaos.fleet.reconciling())
        faults = Faults(
            cloud,
            ministack.client("sqs"),
            seed=seed,
            num_shards=NUM_SHARDS,
            stop_seconds=1.5 * LEASE_SECONDS,
            mend=chaos.mend,
        )
        cloud.drop("x", request_lines())
        batch_id = wait_for_batch(cloud, aws, deployment)
        faults.do_harm(HARM_SECONDS, batch_id)
        sys.stdout.writelines(f"{fault}\n" for fault in faults.done)
        report = wait_until_idle(chaos, "x", 240)
        names = chaos.names()
        cloud.drop("y", request_lines())
        faults.do_harm(AGAIN_SECONDS, wait_for_batch(cloud, aws, deployment))
        again = wait_until_idle(chaos, "y", 240)
        counts = read_counts(url)
    bucket = Cloud(resources, environment_for(ministack.endpoint_url), tmp_path)
    check_second_run(bucket, again)
    rows, errors = bucket.rows("x"), bucket.rows("x", ".errors")
    expected = [f"line-{number}" for number in range(1, NUM_LINES + 1)]
    assert [row["custom_id"] for row in rows] == [n for n in expected if not is_bad(n)]
    assert [row["custom_id"] for row in errors] == [n for n in expected if is_bad(n)]
    assert report["status"] == "completed"
    assert report["request_counts"] == {
        "total": NUM_LINES,
        "completed": len(rows),
        "failed": len(errors),
    }
    assert {fault.kind for fault in faults.done} & {"SIGKILL", "SIGSTOP", "SIGTERM"}
    assert counts.keys() >= {"refused", "lost", "slow"}
    logs = {name: read_log(bucket.read_log(name)) for name in names}
    assert len(logs) > NUM_WORKERS, "no worker was replaced"
    everything = [event for log in logs.values() for event in log]
    assert overlooked(everything) == []
    assert most_parts_of_a_claim(everything) > 1
    for name, log in logs.items():
        journal = read_journal(chaos.journal_of(name))
        assert computed_although_kept(journal, log) == []
        assert lost_without_reason(name, journal, log, faults.done, LOST_SECONDS) == []


def check_second_run(bucket: Cloud, report: dict[str, Any]) -> None:
    """Check that the same file has the same rows again, most of them by reuse."""
    replies = [
        [row | {"response": row["response"] | {"body": row["response"]["body"] | {"created": 0}}}
         for row in bucket.rows(name)]
        for name in ("x", "y")
    ]  # fmt: skip
    assert replies[0] == replies[1]
    assert bucket.rows("x", ".errors") == bucket.rows("y", ".errors")
    assert report["status"] == "completed"
    assert NUM_LINES / 2 < report["tidemill"]["reused_rows"] <= len(replies[0])


def is_bad(name: str) -> bool:
    """Say whether the request of this name is one that fails."""
    return int(name.rpartition("-")[2]) % 50 == 0
