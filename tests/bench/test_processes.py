"""Measuring a command from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.processes import Marks, RunFailed, descendants, measure, tree_bytes

MARKS = Marks(ready="model ready", done="all done")
MEGABYTES_HELD = 64
# A grandchild that holds memory until its standard input closes, under a child that only waits.
HOLDER = f"""
import subprocess, sys
held = "held = b'x' * ({MEGABYTES_HELD} << 20); print('holding', flush=True); input()"
subprocess.run([sys.executable, "-c", held], stdin=sys.stdin)
"""


def python(code: str) -> list[str]:
    """Return the command that runs `code`."""
    return [sys.executable, "-c", code]


def test_the_phase_between_the_marks_is_inside_the_whole(tmp_path: Path) -> None:
    """Both marks are found, even after a progress bar that a carriage return redraws."""
    code = "import sys; sys.stderr.write('0 %\\rmodel ready\\r50 %\\r'); print('all done')"
    measured = measure(python(code), {}, MARKS, tmp_path / "log")
    assert 0 <= measured.steady_seconds <= measured.whole_seconds
    assert "model ready" in (tmp_path / "log").read_text()


def test_the_environment_reaches_the_command(tmp_path: Path) -> None:
    """Variables of a peer are set on top of those that are there."""
    code = "import os; print('model ready'); print(os.environ['OF_THE_PEER'], os.environ['PATH'])"
    measure(python(code), {"OF_THE_PEER": "all done"}, MARKS, tmp_path / "log")
    assert f"all done {os.environ['PATH']}" in (tmp_path / "log").read_text()


def test_a_command_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    """A status other than 0 is never a figure, whatever was printed."""
    code = "import sys; print('model ready\\nall done'); sys.exit('out of luck')"
    with pytest.raises(RunFailed, match=r"(?s)status 1.*out of luck"):
        measure(python(code), {}, MARKS, tmp_path / "log")


def test_a_mark_that_never_comes_is_named(tmp_path: Path) -> None:
    """A peer whose words have changed gives an error and no figure."""
    with pytest.raises(RunFailed, match=r"never printed \['all done'\]"):
        measure(python("print('model ready')"), {}, MARKS, tmp_path / "log")


def test_memory_counts_the_whole_process_tree() -> None:
    """A grandchild's memory is part of the peak, because vLLM forks its engine."""
    with subprocess.Popen(python(HOLDER), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        assert len(descendants(process.pid)) == 2
        held_bytes = tree_bytes(process.pid)
        process.stdin.close()
    assert held_bytes > MEGABYTES_HELD << 20


def test_a_tree_that_has_ended_holds_nothing() -> None:
    """Sampling a process that has ended does not raise."""
    process = subprocess.Popen(python(""))
    process.wait()
    assert tree_bytes(process.pid) == 0
