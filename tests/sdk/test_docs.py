"""A program of docs/guides/python-and-notebooks.md and the examples of docstrings run."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from tidemill import Engine
from tidemill.sdk import engine as engine_module

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/python-and-notebooks.md"


def test_a_program_of_the_page_ignores_modules_of_the_working_folder(tmp_path: Path) -> None:
    """The first program runs next to a `json.py`; tests/docs runs the others."""
    program, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "json.py").write_text("raise RuntimeError('of the working folder')")
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 3


def test_the_examples_of_docstrings_are_true() -> None:
    """They share an engine, which the class's own example starts."""
    with Engine(max_num_seqs=64) as engine:
        given = {"engine": engine, "Engine": lambda **_: nullcontext(engine)}
        globs = {**vars(engine_module), **given}
        found = doctest.DocTestFinder().find(engine_module.Engine, "Engine", False, globs)  # noqa: FBT003 - its module is tidemill
        runner = doctest.DocTestRunner()
        examples = {test.name.rpartition(".")[2]: runner.run(test) for test in found}
    assert {name for name, result in examples.items() if result.attempted} == {
        *("Engine", "answer", "answer_one", "answer_many", "answer_table", "decide")
    }
    assert [name for name, result in examples.items() if result.failed] == []
