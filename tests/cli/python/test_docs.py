"""Programs of docs/python.md, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(("place", "lines"), [(0, 20), (1, 1), (2, 1)])
def test_a_program_of_the_page_runs(place: int, lines: int, tmp_path: Path) -> None:
    """And prints as many lines; no process of it imports what lies in the working folder."""
    (tmp_path / "questions.csv").write_text("id,question\n1,What is 12 + 7?\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('of the working folder')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAMS[place]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(PROGRAMS) == 3
    assert len(done.stdout.splitlines()) == lines
