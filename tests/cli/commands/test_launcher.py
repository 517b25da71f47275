"""`tidemill launcher`, typed, between an emulator of AWS and a cluster that answers by HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.place import cells_of, typed
from tests.emulators import MODEL, Emulator
from tests.handler.fleet.kubernetes.cluster import NAMESPACE, Cluster, serving
from tests.handler.fleet.kubernetes.rig import Rig
from tests.handler.intake.rig import Cloud
from tidemill.handler.fleet.scale import LAUNCH_SECONDS

# Slower than any machine that is busy with other tests.
_SECONDS = 60.0


@pytest.fixture
def rig(ministack: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return a deployment and a cluster that the environment names, as a chart would."""
    with serving(Cluster()) as cluster:
        made = Rig(Cloud.on(ministack, shard_lines="1"), cluster, tmp_path / "plans.json")
        made.write()
        variables = {
            **made.cloud.environment,
            "TIDEMILL_PLANS": str(made.file),
            "TIDEMILL_NAMESPACE": NAMESPACE,
            "TIDEMILL_API_SERVER": cluster.url,
            "TIDEMILL_HEALTH_FILE": str(tmp_path / "health"),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield made
        made.client.close()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a state."""
    until = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < until, "it does not come to pass"
        time.sleep(0.05)


def test_it_runs_until_sigterm(rig: Rig, tmp_path: Path) -> None:
    """Jobs come with work, a changed file is read, a wrong one is a line of its log."""
    command = [sys.executable, "-m", "tidemill.cli", "launcher", "--interval", "1"]
    rig.open()
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(lambda: len(rig.alive) == 3)
            assert (tmp_path / "health").exists()
            rig.file.write_text("{", encoding="utf-8")
            wait_for(lambda: "plans not read" in (tmp_path / "log").read_text(encoding="utf-8"))
            rig.write(max_workers=4)
            wait_for(lambda: len(rig.alive) == 4)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(_SECONDS) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    messages = [line["message"] for line in lines]
    services = [line["service"] for line in lines if line["message"] == "figures"]
    assert set(services) == {"launcher"}
    assert messages.count("worker started") == 4
    assert messages[-1] == "launcher ended"
    [wrong] = [line["reason"] for line in lines if line["level"] == "ERROR"][:1]
    assert "plans.json: is not JSON" in wrong
    assert len(rig.alive) == 4


def refusal_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit status and the error of a launcher that does not start."""
    status, _, err = typed(capsys, "launcher", *words)
    return status, err


def test_invalid_settings_are_reported_immediately(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of settings, plans, the cluster and AWS contain advice."""
    rig.write(gpu=1)
    assert refusal_of(capsys) == (
        2,
        f"tidemill: {rig.file}: {MODEL}.means.gpu is not a known key of a plan\n",
    )
    rig.write()
    status, stderr = refusal_of(capsys, "--namespace", "other")
    assert (status, 'namespaces "other" not found' in stderr) == (1, True)
    status, stderr = refusal_of(capsys, "--api-server", "http://127.0.0.1:9")
    assert (status, "http://127.0.0.1:9 cannot be reached" in stderr) == (1, True)
    monkeypatch.setenv("TIDEMILL_TABLE", "nothing")
    status, stderr = refusal_of(capsys)
    assert (status, "the table nothing cannot be read: " in stderr) == (1, True)
    monkeypatch.delenv("TIDEMILL_TABLE")
    assert refusal_of(capsys) == (2, "tidemill: TIDEMILL_TABLE: Field required\n")
    monkeypatch.delenv("TIDEMILL_PLANS")
    assert refusal_of(capsys)[1].startswith("tidemill: no plans: pass --plans")


def test_workers_of_a_cluster_are_listed_stopped_and_started_again(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands work as for a deployment with its own workers, in the launcher's environment."""
    rig.open()
    rig.step()
    rig.cluster.run_pods()
    capsys.readouterr()
    _, cells = cells_of(typed(capsys, "workers", "list")[1])
    assert cells[0] == MODEL
    assert cells[2:6] == ["0", "3", "0", "3"]
    status, _, err = typed(capsys, "workers", "stop", MODEL)
    assert (status, "3 workers of" in err) == (0, True)
    assert all("deletionTimestamp" in job["metadata"] for job in rig.alive)
    for job in rig.alive:
        rig.cluster.exit(job)
    rig.step(15)
    assert rig.alive == []
    assert typed(capsys, "workers", "resume", MODEL)[0] == 0
    rig.step(LAUNCH_SECONDS)
    assert len(rig.alive) == 3
