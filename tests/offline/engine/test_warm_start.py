"""A second start of the same model: it does without what takes long, and gives the same rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.demo import MODEL_PATH

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/demo.jsonl"
RUN = """
import sys
from tidemill.cli.main import main
status = main(sys.argv[1:])
print(status, *sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def loaded_by_a_run(model: Path, output: Path, cache: str) -> list[str]:
    """Run the example file through a model and return the libraries that were imported."""
    flags = ["--model", str(model), "--any-model", "--dtype", "float32", "--device", "cpu"]
    process = subprocess.run(
        [sys.executable, "-c", RUN, "run", "-i", str(EXAMPLE), "-o", str(output), *flags],
        cwd=ROOT,
        env=os.environ | {"TIDEMILL_CACHE": cache},
        check=True,
        capture_output=True,
        text=True,
    )
    status, *libraries = process.stdout.split()
    assert status == "0", process.stderr
    return libraries


def test_a_warm_start_imports_no_transformers_and_gives_the_same_rows(tmp_path: Path) -> None:
    """A cold one does; so does a warm one once a file of the tokenizer has changed."""
    model, cache = tmp_path / "model", str(tmp_path / "cache")
    shutil.copytree(MODEL_PATH, model)
    both = ["torch", "transformers"]
    assert loaded_by_a_run(model, tmp_path / "cold.jsonl", cache) == both
    assert loaded_by_a_run(model, tmp_path / "warm.jsonl", cache) == ["torch"]
    assert (tmp_path / "warm.jsonl").read_bytes() == (tmp_path / "cold.jsonl").read_bytes()
    (model / "tokenizer_config.json").write_text(
        (model / "tokenizer_config.json").read_text() + "\n"
    )
    assert loaded_by_a_run(model, tmp_path / "changed.jsonl", cache) == both


@pytest.mark.long  # tests of the disk cache have folders that are none
def test_where_nothing_can_be_remembered_a_run_is_as_it_was(tmp_path: Path) -> None:
    """If the folder's path is a file, nothing is written and nothing is printed."""
    (tmp_path / "file").write_text("mine")
    libraries = loaded_by_a_run(MODEL_PATH, tmp_path / "out.jsonl", str(tmp_path / "file"))
    assert libraries == ["torch", "transformers"]
    assert (tmp_path / "file").read_text() == "mine"
