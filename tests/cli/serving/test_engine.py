"""The real engine behind `tidemill run`: what a person reads of a model that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.main import main
from demo import MODEL_PATH
from tests.cli.given import line, rows


def test_a_small_cache_shortens_the_context_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A chat line without max_tokens asks for the rest of the context: it runs, alone or by eight.

    The demo model of 2,048 positions takes 2,560 bytes a token in fp32.
    """
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "n": 8}
    asked = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(asked))
    files = ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]
    small = ["--kv-cache-memory", str(100 * 2560), "--dtype", "float32", "--device", "cpu"]
    assert main(["run", *files, *small]) == 0
    choices = rows(tmp_path / "out.jsonl")[0]["response"]["body"]["choices"]
    assert len(choices) == 8
    said = capfd.readouterr().err
    assert "the context is 96 tokens, not the model's 2,048" in said

    assert main(["run", *files, *small, "--max-model-len", "2048", "--force"]) == 1
    assert "tidemill: --max-model-len 2048 needs" in capfd.readouterr().err.splitlines()[-1]


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
