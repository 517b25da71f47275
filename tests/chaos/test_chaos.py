"""Whatever happens to processes, messages and answers of AWS: every line gets its row, once.

`make test` runs one seed and `make test-all` three; `TIDEMILL_CHAOS_SEEDS=all` runs twenty, `=7,11`
those.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from handler.aws.sync import Aws
from handler.deployment import Deployment
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
from tests.emulators import Emulator, deployment_of

NUM_LINES, SHARD_LINES, NUM_SHARDS = 2000, 80, 25
WORKERS = ["worker-0", "worker-1", "worker-2"]
HARM_SECONDS = 15
LEASE_SECONDS = 3
LOST_SECONDS = 10
FAULT_RATE = 0.02
MODEL = "scripted"
ENGINE = Path(__file__).parents[1] / "handler/worker/scripted_engine.py"
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
    """Return the seeds that the environment asks for."""
    asked = os.environ.get("TIDEMILL_CHAOS_SEEDS")
    if asked is None:
        return [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
    return list(range(1, 21)) if asked == "all" else [int(seed) for seed in asked.split(",")]


def request_lines() -> bytes:
    """Return the file: every fiftieth request fails, so that there are two outputs."""
    lines = []
    for number in range(1, NUM_LINES + 1):
        name = f"line-{number}"
        body = {"model": MODEL, "custom_id": name} | ({"status": 400} if number % 50 == 0 else {})
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    return "\n".join(lines).encode()


class ChaosCloud:
    """A pump and three workers that may be started again and again under their names."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.lives = dict.fromkeys(WORKERS, 0)

    def restart(self, name: str) -> None:
        """Start the process of this name; each life of a worker has a journal of its own."""
        if name == "pump":
            self.cloud.start_pump("--reaper-seconds", "2")
            return
        self.lives[name] += 1
        engine = [
            sys.executable,
            str(ENGINE),
            "--log",
            str(self.journal_of(name, self.lives[name])),
        ]
        engine += ["--slots", "8", "--service-seconds", "0.2", "--stats-seconds", "0.5"]
        self.cloud.start_worker(
            "--served-model-name", MODEL, name=name, TIDEMILL_ENGINE_COMMAND=json.dumps(engine)
        )

    def journal_of(self, name: str, life: int) -> Path:
        """Return where the engine of a worker's life notes what it computes."""
        return self.cloud.folder / f"journal-{name}-{life}"


def wait_for_batch(cloud: Cloud, aws: Aws, deployment: Deployment) -> str:
    """Return the id of the batch that the drop has made, once it runs."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for batch_id in aws.run(deployment.table.list_active()):
            batch = aws.run(deployment.table.get_batch(batch_id))
            if batch is not None and batch.num_shards:
                assert batch.num_shards == NUM_SHARDS
                return batch.id
        time.sleep(0.1)
    raise AssertionError(cloud.log_of("pump"))


@pytest.mark.parametrize("seed", chosen_seeds())
def test_every_line_gets_its_row_once_and_in_order(
    seed: int, ministack: Emulator, tmp_path: Path
) -> None:
    """Three workers under kills, freezes, repeated messages, and AWS failing now and then."""
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
    ):
        chaos = ChaosCloud(cloud)
        for name in ["pump", *WORKERS]:
            chaos.restart(name)
        faults = Faults(
            cloud,
            ministack.client("sqs"),
            seed=seed,
            workers=WORKERS,
            num_shards=NUM_SHARDS,
            stop_seconds=1.5 * LEASE_SECONDS,
            restart=chaos.restart,
        )
        cloud.drop("x", request_lines())
        batch_id = wait_for_batch(cloud, aws, deployment)
        faults.do_harm(HARM_SECONDS, batch_id)
        sys.stdout.writelines(f"{fault}\n" for fault in faults.done)
        report = cloud.wait("x", 240)
        counts = read_counts(url)
    bucket = Cloud(resources, environment_for(ministack.endpoint_url), tmp_path)
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
    logs = {name: read_log(bucket.log_of(name)) for name in WORKERS}
    everything = [event for log in logs.values() for event in log]
    assert overlooked(everything) == []
    assert most_parts_of_a_claim(everything) > 1
    for name, log in logs.items():
        lives = [read_journal(chaos.journal_of(name, n + 1)) for n in range(chaos.lives[name])]
        journal = [each for life in lives for each in life]
        assert computed_although_kept(journal, log) == []
        assert lost_without_reason(name, journal, log, faults.done, LOST_SECONDS) == []


def is_bad(name: str) -> bool:
    """Say whether the request of this name is one that fails."""
    return int(name.rpartition("-")[2]) % 50 == 0
