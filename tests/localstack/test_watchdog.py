"""The watchdog ends the processes that a killed owner leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from localstack.watchdog import Watchdog, kill_process_groups

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
OWNER = f"""
import subprocess, sys
from localstack.watchdog import Watchdog
with Watchdog(5) as watchdog:
    child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
    watchdog.register(child.pid)
    print(child.pid, flush=True)
    child.wait()
"""


def is_there(pid: int) -> bool:
    """Say whether a process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_child_ends_with_an_owner_that_was_killed() -> None:
    """The owner had no time to end it."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    deadline = time.monotonic() + 600
    while is_there(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_does_not_hear_is_killed() -> None:
    """It is killed after its grace period."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], start_new_session=True, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        kill_process_groups({child.pid}, 0.2)
        assert child.wait(60) == -signal.SIGKILL


def test_what_has_ended_in_order_is_left_alone() -> None:
    """Its number may be another's by then."""
    with subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True) as child:
        with Watchdog(0) as watchdog:
            watchdog.register(child.pid)
            watchdog.unregister(child.pid)
        assert child.poll() is None
        os.kill(child.pid, signal.SIGKILL)
