"""SIGINT and SIGTERM at moments when no command has its own way with them yet."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offline.given import line

ROOT = Path(__file__).parents[2]
# Sends itself a signal when a module is imported, in the middle of whatever imports it.
TRAPPED = """
import os, sys
number, trap = int(sys.argv[1]), sys.argv[2]
sys.argv[:] = ["tidemill", *sys.argv[3:]]
def hear(event, details):
    if event == "import" and details[0] == trap:
        os.kill(os.getpid(), number)
sys.addaudithook(hear)
from tidemill.cli.__main__ import main
main()
"""
RUN = ("run", "-i", "{input}", "-o", "{folder}/out.jsonl")
STATUS = ("status", "--base-url", "http://127.0.0.1:1")


def trapped(number: int, trap: str, *typed: str) -> tuple[int, str]:
    """Return exit status and stderr of a command that gets a signal during an import."""
    done = subprocess.run(
        [sys.executable, "-c", TRAPPED, str(number), trap, *typed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("trap", "typed"),
    [
        ("argparse", RUN),
        ("tidemill.offline.run.job", RUN),
        ("pydantic", RUN),
        ("torch", RUN),
        ("tidemill.cli.commands.status", STATUS),
        ("tidemill.cli.api.client", STATUS),
        ("tidemill.cli.batches.submission", ("submit", "{input}")),
        ("boto3", ("drop", "{input}", "--bucket", "b")),
        ("localstack.local", ("local", "up")),
        ("localstack.stacks", ("local", "run", "-i", "{input}", "-o", "{folder}/out.jsonl")),
    ],
)
def test_a_signal_in_an_import_ends_a_command_in_one_line(
    tmp_path: Path, trap: str, typed: tuple[str, ...]
) -> None:
    """With its own status, and without a traceback of what was being imported."""
    number = signal.SIGINT if len(trap) % 2 else signal.SIGTERM
    file = tmp_path / "in.jsonl"
    file.write_text(line("a"))
    words = [word.format(input=file, folder=tmp_path) for word in typed]
    status, stderr = trapped(number, trap, *words)
    assert status == 128 + number, stderr
    assert stderr.splitlines()[-1].startswith(f"tidemill: stopped by {number.name}")
    assert "Traceback" not in stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("trap", ["argparse", "pydantic", "pydantic_core"])
def test_a_worker_without_work_is_stopped_in_order(trap: str) -> None:
    """A scale-in is not a failure: docs/reference/worker.md promises 0."""
    status, stderr = trapped(signal.SIGTERM, trap, "worker", "--model", "m", "--queue", "q")
    assert (status, stderr.replace("tidemill: stopped by SIGTERM\n", "")) == (0, "")


def test_a_signal_that_is_lost_in_a_destructor_ends_the_command() -> None:
    """Python swallows exceptions in destructors, so the run would continue."""
    code = """
import os, signal
import tidemill.cli.__main__
from tidemill.offline.console.signals import StopSignals
class Trap:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass
with StopSignals():
    Trap()
    print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "tidemill: stopped by SIGTERM\n"


def test_the_end_waits_for_no_thread() -> None:
    """A library's thread that still runs must neither hold the process nor abort it."""
    code = """
import sys, threading, time
import tidemill.cli.__main__, tidemill.cli.main
def run():
    threading.Thread(target=time.sleep, args=(600,)).start()
    sys.stdout.write("done")
    return 3
tidemill.cli.main.main = run
tidemill.cli.__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "done", "")


def test_what_was_ignored_stays_ignored() -> None:
    """A signal ignored under nohup stays ignored, also before a command starts."""
    code = (
        "import os, signal, tidemill.cli.__main__; os.kill(os.getpid(), signal.SIGINT); print('on')"
    )
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
    done = subprocess.run(
        [sys.executable, "-c", ignoring], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "on\n")
