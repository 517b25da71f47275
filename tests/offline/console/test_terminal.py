"""Amounts and durations as text, and messages where streams are closed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tidemill.offline.console.signals import end_process
from tidemill.offline.console.terminal import duration, fill_standard_descriptors, log


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min")],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    """A duration reads as a person would say it."""
    assert duration(seconds) == words


def test_no_file_takes_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    """Libraries write to standard error by its number, whatever it is."""
    pid = os.fork()
    if not pid:
        try:
            for fd in range(3):
                os.close(fd)
            sys.stdout = sys.stderr = None
            fill_standard_descriptors()
            with (tmp_path / "out").open("w") as out:
                os.write(2, b"a warning")
                log("a message")
                end_process(os.fstat(out.fileno()).st_size)
        finally:
            os._exit(99)
    assert os.waitpid(pid, 0)[1] == 0
