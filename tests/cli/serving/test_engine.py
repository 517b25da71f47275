"""The real engine behind `tidemill run`: what a person reads of a model that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.main import main
from demo import MODEL_PATH
from tests.cli.given import line


def test_a_checkpoint_without_its_weights_runs_no_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence that names what is wrong, status 1, and an output that stays what it was."""
    model = Path(shutil.copytree(MODEL_PATH, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (tmp_path / "in.jsonl").write_text(line("a", model="demo"))
    files = ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]
    given = ["--model", str(model), "--served-model-name", "demo"]
    assert main(["run", *files, *given]) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[-1].startswith(f"tidemill: {model}: its weights lack lm_head.weight, ")
    assert said[-1].endswith("or config.json is another model's.")
    assert not (tmp_path / "out.jsonl").exists()
