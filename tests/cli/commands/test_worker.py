"""`tidemill worker` as it is typed: where its settings come from, and what it says without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidemill.cli.commands.worker import _engine_command, _read, options_from
from tidemill.cli.main import main, make_parser
from tidemill.offline.console.errors import Refused

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "TIDEMILL_TABLE": "t",
    "TIDEMILL_BUCKET": "b",
    "TIDEMILL_CONTROL_QUEUE": "http://c",
    "TIDEMILL_WORK_QUEUES": '{"tidemill-demo": "http://demo", "m": "http://m"}',
}


def read(*arguments: str, **environment: str) -> Any:
    """Return the settings and the configuration that flags and variables give."""
    options = options_from(make_parser("worker").parse_args(["worker", *arguments]))
    return _read(options, ENVIRONMENT | environment)


def test_settings_come_from_the_environment() -> None:
    """A container's definition sets them."""
    settings, config = read(TIDEMILL_LEASE_SECONDS="12", TIDEMILL_MAX_ATTEMPTS="3")
    assert (settings.table, settings.bucket, settings.control_queue) == ("t", "b", "http://c")
    assert settings.max_attempts == 3
    assert (config.queue, config.lease_seconds) == ("http://demo", 12)


def test_flags_win_over_the_environment() -> None:
    """Each of them."""
    settings, config = read(
        *(
            "--table",
            "t2",
            "--bucket",
            "b2",
            "--control-queue",
            "http://c2",
            "--queue",
            "http://q2",
        ),
        *("--lease-seconds", "7.5", "--flush-bytes", "2M", "--max-inflight", "9"),
        *("--exit-when-idle", "0.5", "--max-attempts", "2"),
        TIDEMILL_LEASE_SECONDS="12",
        TIDEMILL_QUEUE="http://other",
    )
    assert (settings.table, settings.bucket, settings.control_queue) == ("t2", "b2", "http://c2")
    assert settings.max_attempts == 2
    assert (config.queue, config.lease_seconds) == ("http://q2", 7.5)
    assert (config.flush_bytes, config.max_inflight) == (2 * 2**20, 9)
    assert config.exit_when_idle_seconds == 0.5


@pytest.mark.parametrize(("typed", "seconds"), [((), None), (("--exit-when-idle",), 300.0)])
def test_a_worker_waits_for_work_by_default(typed: tuple[str, ...], seconds: float | None) -> None:
    """It waits forever without the flag, and a few minutes without a number."""
    assert read(*typed)[1].exit_when_idle_seconds == seconds


def test_engines_that_the_machine_has_no_room_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, before anything is loaded or received."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main(["worker", "--device", "cpu", "-dp", "10000"]) == 2
    assert "--data-parallel-size 10000 needs 10000 cores" in capsys.readouterr().err


def test_the_hours_of_idle_workers_are_checked() -> None:
    """Invalid hours are reported before a model loads."""
    config = read("--min-workers", "2", "--min-workers-hours", "Mon-Fri 07:00-18:00")[1]
    assert (config.min_workers, config.min_workers_hours) == (2, "Mon-Fri 07:00-18:00")
    with pytest.raises(Refused, match=r"--min-workers-hours or .* is not a span such as"):
        read("--min-workers-hours", "always")


@pytest.mark.parametrize(
    ("arguments", "queue"),
    [
        ((), "http://demo"),
        (("--model", "m"), "http://m"),
        (("--model", "x", "--served-model-name", "y", "m"), "http://m"),
    ],
)
def test_the_queue_is_that_of_the_served_model(arguments: tuple[str, ...], queue: str) -> None:
    """A flag can override it."""
    assert read(*arguments)[1].queue == queue
    assert read(*arguments, TIDEMILL_QUEUE="http://q")[1].queue == "http://q"


def test_a_model_without_a_queue_is_refused() -> None:
    """With its name, and what to do."""
    with pytest.raises(Refused, match="no work queue for other: pass --queue"):
        read("--model", "other")


def test_what_is_missing_or_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every setting at once, as it would be typed and as a variable; exit status 2."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert main(["worker", "--queue", "q", "--bucket", "b"]) == 2
    err = capsys.readouterr().err
    assert "--table or TIDEMILL_TABLE: Field required" in err
    assert "--control-queue or TIDEMILL_CONTROL_QUEUE: Field required" in err
    assert "bucket" not in err
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert main(["worker", "--lease-seconds", "soon"]) == 2
    assert "--lease-seconds or TIDEMILL_LEASE_SECONDS: Input should be" in capsys.readouterr().err
    assert main(["worker", "--wait-seconds", "60"]) == 2
    assert "TIDEMILL_WAIT_SECONDS" in capsys.readouterr().err


def run_without(*libraries: str) -> subprocess.CompletedProcess[str]:
    """Run a worker on a machine that has no region and lacks these libraries."""
    code = f"""
import sys
sys.modules.update(dict.fromkeys({libraries}))
from tidemill.cli.main import main
sys.exit(main(["worker"]))
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=ENVIRONMENT | {"HOME": "nowhere", "AWS_EC2_METADATA_DISABLED": "true"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["aiobotocore", "pydantic_core", "aws_lambda_powertools"])
def test_a_missing_library_is_named_with_what_installs_it(name: str) -> None:
    """In a sentence, not a traceback."""
    done = run_without(name)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tidemill: a worker needs {name}")
    assert "which is not installed: " in done.stderr
    assert done.stderr.endswith(f" -e '{ROOT}[cloud,engine]'\n")


def test_a_missing_region_is_reported() -> None:
    """AWS requires a region."""
    done = run_without()
    assert done.returncode == 1
    assert done.stderr == "tidemill: an AWS call failed: You must specify a region.\n"


def test_the_engine_gets_the_flags_of_its_group() -> None:
    """It runs in a child process with the same Python."""
    options = options_from(
        make_parser("worker").parse_args(
            ["worker", "--model", "m", "--max-num-seqs", "3", "--queue", "q"]
        )
    )
    started = _engine_command(options, {})
    assert started[0] == sys.executable
    assert "tidemill.offline.engine.process" in started
    assert {"--model=m", "--max-num-seqs=3"} <= set(started)
    assert not any("queue" in word for word in started)
    other = ["python", "x.py"]
    assert _engine_command(options, {"TIDEMILL_ENGINE_COMMAND": json.dumps(other)}) == other
