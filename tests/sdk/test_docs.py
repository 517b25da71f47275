"""Programs of docs/guides/python.md and examples of docstrings, run as they stand there."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tidemill import Engine
from tidemill.sdk import engine as engine_module

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/guides/python.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(("place", "lines"), [(0, 5), (1, 1), (2, 1)])
def test_a_program_of_the_page_runs(place: int, lines: int, tmp_path: Path) -> None:
    """It prints as many lines; its processes import nothing from the working folder."""
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


def test_the_examples_of_docstrings_are_true() -> None:
    """They share an engine, which the class's own example starts."""
    with Engine(max_num_seqs=64) as engine:
        given = {"engine": engine, "Engine": lambda **_: nullcontext(engine)}
        globs = {**vars(engine_module), **given}
        found = doctest.DocTestFinder().find(engine_module.Engine, "Engine", False, globs)  # noqa: FBT003 - its module is tidemill
        runner = doctest.DocTestRunner()
        examples = {test.name.rpartition(".")[2]: runner.run(test) for test in found}
    assert {name for name, result in examples.items() if result.attempted} == {
        *("Engine", "answer", "answer_one", "answer_many", "answer_table")
    }
    assert [name for name, result in examples.items() if result.failed] == []
