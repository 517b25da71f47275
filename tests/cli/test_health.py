"""Tests of the heartbeat file and the health check."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.cli import health
from tidemill.cli.health import MAX_AGE_SECONDS, Heartbeat, find_problem, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("age", "words"),
    [
        (0.0, None),
        (MAX_AGE_SECONDS - 1, None),
        (-3600.0, None),
        (MAX_AGE_SECONDS + 1, "the worker has not touched {} for 61 s"),
    ],
)
def test_a_worker_is_alive_that_has_touched_its_file_lately(
    tmp_path: Path, age: float, words: str | None
) -> None:
    """A clock that was set back does not make it unhealthy."""
    path = tmp_path / "alive"
    path.touch()
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert find_problem(path, 1_000_000) == (words and words.format(path))


def test_without_a_file_there_is_no_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither before it has begun, nor when none is named."""
    path = tmp_path / "alive"
    assert main([str(path)], {}) == 1
    assert capsys.readouterr().out == f"no worker has touched {path}: No such file or directory\n"
    assert main([], {}) == 1
    assert capsys.readouterr().out == "TIDEMILL_HEALTH_FILE is not set\n"


def test_the_check_is_a_process_that_loads_little(tmp_path: Path) -> None:
    """It takes the path from the variable and says its result by its exit status."""
    path = tmp_path / "alive"
    path.touch()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tidemill.cli.health"],
        cwd=ROOT,
        env={"TIDEMILL_HEALTH_FILE": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "pathlib" in loaded
    assert loaded & {"pydantic", "botocore", "httpx", "torch"} == set()


async def test_a_pulse_beats_as_long_as_the_loop_gets_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat stops when the loop is blocked."""
    monkeypatch.setattr(health, "_BEAT_SECONDS", 0.01)
    path = tmp_path / "alive"

    async def touched() -> None:
        path.unlink(missing_ok=True)
        while not path.exists():  # noqa: ASYNC110 - a file cannot wake a waiter
            await asyncio.sleep(0.005)

    async with Heartbeat(path).beating():
        await touched()
        await touched()
    path.unlink()
    await asyncio.sleep(0.05)
    assert not path.exists()


def test_a_pulse_that_is_beaten_often_touches_seldom(tmp_path: Path) -> None:
    """Callers may beat at any rate."""
    path = tmp_path / "alive"
    pulse = Heartbeat(path)
    pulse.beat()
    path.unlink()
    pulse.beat()
    assert not path.exists()


def test_a_pulse_without_a_file_or_a_disk_is_harmless(tmp_path: Path) -> None:
    """Only the check reports it."""
    Heartbeat(None).beat()
    Heartbeat(tmp_path / "no" / "folder").beat()
    assert list(tmp_path.iterdir()) == []
