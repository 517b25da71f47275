"""The host's path of a line, in calls of functions: a number that no other work changes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from bench.kernels.host_path import run_here, write_lines

FEW, MANY = 200, 800


def calls_of(folder: Path, count: int, rows: str) -> int:
    """Return the calls of a run of some lines."""
    source, num_calls = folder / f"{count}.jsonl", 0
    write_lines(source, count, rows)

    def record(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(record)
    try:
        run_here(source, source.with_suffix(".out"), count)
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize(("rows", "most"), [("chat", 127), ("vectors-base64", 134)])
def test_a_line_costs_few_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, most: int
) -> None:
    """It is checked, planned, answered by a null engine and written; the run itself is left out."""
    calls_of(tmp_path, 10, rows)  # imports
    each = (calls_of(tmp_path, MANY, rows) - calls_of(tmp_path, FEW, rows)) / (MANY - FEW)
    capsys.readouterr()
    assert 0.7 * most < each <= most
