"""Real workers as Jobs of a real launcher: every line gets its row, whatever happens to pods."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localstack.cloud import Cloud
from localstack.ministack import environment_for
from localstack.resources import create_resources
from tests.emulators import Emulator
from tests.handler.fleet.kubernetes.cluster import NAMESPACE, Cluster, serving
from tests.handler.fleet.kubernetes.kubelet import Kubelet
from tidemill.batch.fleet import WorkerRate

pytestmark = pytest.mark.long

NUM_LINES = 600
MODEL = "scripted"
ENGINE = Path(__file__).parents[1] / "engine_process/scripted_engine.py"
SETTINGS = {
    "TIDEMILL_SHARD_LINES": "40",
    "TIDEMILL_LEASE_SECONDS": "3",
    "TIDEMILL_FLUSH_SECONDS": "0.5",
    "TIDEMILL_VISIBILITY_SECONDS": "4",
    "TIDEMILL_WAIT_SECONDS": "1",
    "TIDEMILL_GRACE_SECONDS": "1",
    "TIDEMILL_MAX_INFLIGHT": "16",
    "TIDEMILL_MAX_SHARDS": "2",
}
_SECONDS = 120.0


def write_plans(path: Path, image: str, folder: Path) -> None:
    """Write a plan of three workers of an image."""
    engine = [sys.executable, str(ENGINE), "--log", f"{folder}/journal-$TIDEMILL_WORKER"]
    engine += ["--slots", "4", "--service-seconds", "0.2", "--stats-seconds", "0.5"]
    environment = SETTINGS | {"TIDEMILL_ENGINE_COMMAND": json.dumps(engine)}
    means = {"image": image, "gpus": 0, "environment": environment}
    plan = {"max_workers": 3, "target_seconds": 1, "start_seconds": 1, "idle_seconds": 2}
    path.write_text(json.dumps({MODEL: plan | {"means": means}}), encoding="utf-8")


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what is waited for."""
    deadline = time.monotonic() + _SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.1)
    return found


def test_a_file_is_answered_by_pods_that_come_and_go(ministack: Emulator, tmp_path: Path) -> None:
    """A kill, a drained node, a release, a launcher that ends: no line is lost or done twice."""
    resources = create_resources(
        ministack.endpoint_url,
        prefix=f"pods-{os.getpid()}",
        models=[MODEL],
        control_visibility_seconds=25,
        work_visibility_seconds=4,
    )
    environment = environment_for(ministack.endpoint_url) | SETTINGS
    plans = tmp_path / "plans.json"
    write_plans(plans, "tidemill:1", tmp_path)
    with serving(Cluster()) as cluster, Cloud(resources, environment, tmp_path) as cloud:
        kubelet = Kubelet(cluster, cloud)
        launcher = [sys.executable, "-m", "tidemill", "launcher", "--interval", "1"]
        launcher += ["--plans", str(plans), "--namespace", NAMESPACE, "--api-server", cluster.url]
        # As reported by an earlier batch: else there is one worker until its pace is known.
        cloud.aws.run(cloud.deployment.fleets.put_rate(MODEL, WorkerRate(rows_per_second=1.0)))
        cloud.start_lambdas("--reaper-seconds", "2")
        process = cloud.start("launcher", *launcher)
        with kubelet.watching():
            lines = [line_of(number) for number in range(NUM_LINES)]
            cloud.drop("x", "\n".join(lines).encode())
            wait_for(lambda: len(kubelet.running) == 3)
            wait_for(lambda: journals(tmp_path))
            killed, drained, _ = list(kubelet.running)
            kubelet.kill(killed)
            kubelet.disrupt(drained)
            wait_for(lambda: len(cluster.jobs) == 5)
            process.terminate()
            assert process.wait(60) == 0
            write_plans(plans, "tidemill:2", tmp_path)
            cloud.start("launcher", *launcher)
            first = wait_for(lambda: cloud.report("x"))
            wait_for(lambda: not cluster.alive())
            cloud.drop("y", "\n".join(lines[:40]).encode())
            second = wait_for(lambda: cloud.report("y"))
            wait_for(lambda: not cluster.alive())
        rows = cloud.rows("x")
        state = cloud.aws.run(cloud.deployment.fleets.get_state(MODEL))
    assert [report["status"] for report in (first, second)] == ["completed"] * 2
    assert [row["custom_id"] for row in rows] == [f"line-{n}" for n in range(NUM_LINES)]
    assert state.breaker is None
    pods = [job["spec"]["template"]["spec"] for job in cluster.jobs.values()]
    images = [container["image"] for pod in pods for container in pod["containers"]]
    assert set(images) == {"tidemill:1", "tidemill:2"}


def journals(folder: Path) -> list[Path]:
    """Return what engines note; none before all three have begun."""
    found = list(folder.glob("journal-*"))
    return found if len(found) == 3 and all(each.stat().st_size for each in found) else []


def line_of(number: int) -> str:
    """Return a request."""
    body = {"model": MODEL, "custom_id": f"line-{number}", "temperature": 0}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line | {"custom_id": f"line-{number}"})
