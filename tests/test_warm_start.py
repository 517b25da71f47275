"""Processes that are forked from a server behave like those that are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from execnet import XSpec
from execnet.gateway_io import popen_args

from tests.warm_start import COLD_VARIABLE, FORKED, WarmStarts, installed_starts

run = partial(subprocess.run, capture_output=True, text=True, check=False)
WAITS = [sys.executable, "-m", "tidemill", "run", "-i", "-", "-o", "rows.jsonl", "--model", "m"]

pytestmark = pytest.mark.skipif(COLD_VARIABLE in os.environ, reason="processes start as usual")


@pytest.fixture(autouse=True, scope="module")
def _server() -> Iterator[None]:
    """Use this process's server, or a new one if tests have changed variables it has read."""
    usual = subprocess._fork_exec  # type: ignore[attr-defined]
    own = installed_starts()
    if own is None:
        pytest.skip("this system has no CLONE_PARENT")
    new = WarmStarts(own._start)
    starts = own if own._environment == new._environment else new
    starts.wait()
    subprocess._fork_exec = starts.fork_exec  # type: ignore[attr-defined]
    try:
        run([sys.executable, "-m", "tidemill", "--version"])
        if starts.is_refused:
            pytest.skip("this kernel refuses CLONE_PARENT")
        yield
    finally:
        subprocess._fork_exec = usual  # type: ignore[attr-defined]
        new._close()


def is_warm(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process is a clone of the server."""
    return b"tests.warm_start" in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_a_process_is_a_child_with_its_own_folder_and_session(tmp_path: Path) -> None:
    """A signal ends it, and its status is that signal."""
    with subprocess.Popen(
        WAITS, cwd=tmp_path, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        assert is_warm(process)
        assert os.getpgid(process.pid) == process.pid
        assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path
        process.kill()
    assert process.returncode == -9


def test_streams_and_the_status_are_those_of_the_command(tmp_path: Path) -> None:
    """Standard output and standard error belong to the process."""
    command = [sys.executable, "-m", "tidemill"]
    done = run([*command, "--version"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tidemill ")
    done = run([*command, "view", "-", "--no-such-flag"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--no-such-flag" in done.stderr


def test_a_process_of_tests_is_forked_too() -> None:
    """It reads its program as execnet sends it."""
    command = popen_args(XSpec("popen"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert is_warm(process)
        output, _ = process.communicate(b"'print(1 + 1)'\n")
    assert (process.returncode, output) == (0, b"2\n")


def test_a_marked_program_is_forked_too() -> None:
    """It has its arguments, and its globals are those of the main module."""
    code = f"{FORKED}import sys; input(); print(sys.argv, __name__)"
    command = [sys.executable, "-c", code, "x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert is_warm(process)
        output, _ = process.communicate(b"\n")
    assert (process.returncode, output) == (0, b"['-c', 'x'] __main__\n")


@pytest.mark.parametrize("name", ["HOME", "OMP_NUM_THREADS", COLD_VARIABLE])
def test_other_settings_start_a_process_as_usual(tmp_path: Path, name: str) -> None:
    """Values that libraries read at their import are not those of the server."""
    environment = os.environ | {name: str(tmp_path)}
    with subprocess.Popen(WAITS, cwd=tmp_path, stdin=subprocess.PIPE, env=environment) as process:
        assert not is_warm(process)
        process.kill()
