"""The real engine behind `tidemill run`, and its errors for models that cannot be served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.long_parameters import with_long
from tests.offline.given import line, rows
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH
from tidemill.engine.config import AdmissionName, EngineConfig
from tidemill.engine.loop.assembly import ADMISSIONS
from tidemill.offline.engine.engine import engine_config
from tidemill.offline.engine.options import EngineOptions

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/demo.jsonl"


def test_a_small_cache_shortens_the_context_with_a_note(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A chat line without max_tokens requests the rest of the context and runs, also with n=8.

    The demo model has 2,048 positions and needs 2,560 bytes per token in fp32.
    """
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "n": 8}
    request = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    files = ["-i", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl"]
    small = ["--kv-cache-memory", str(100 * 2560), "--dtype", "float32", "--device", "cpu"]
    assert main(["run", *files, *small]) == 0
    choices = rows(tmp_path / "out.jsonl")[0]["response"]["body"]["choices"]
    assert len(choices) == 8
    stderr = capfd.readouterr().err
    assert "the context is 96 tokens, not the model's 2,048" in stderr

    assert main(["run", *files, *small, "--max-model-len", "2048", "--force"]) == 1
    assert "tidemill: --max-model-len 2048 needs" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_a_run_announces_the_compilation_of_kernels_only_when_it_happens(tmp_path: Path) -> None:
    """One line is printed before the model is loaded; the next run finds all kernels compiled."""
    command = [sys.executable, "-m", "tidemill", "run", "--force", "-i", str(EXAMPLE)]
    words = "tidemill: compiling the CPU's kernels, once on this machine (up to a minute)"
    for count in (1, 0):
        ran = subprocess.run(
            [*command, "-o", str(tmp_path / "rows.jsonl"), "--dtype", "float32"],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stderr.count(words) == count
        assert words not in ran.stderr.partition("model loaded")[2]


def test_commands_start_together_what_begins_alike() -> None:
    """A file run reorders its rows by prefix; a server keeps the order of arrival."""
    config = engine_config(EngineOptions(model=str(MODEL_PATH)))
    assert (config.admission, EngineConfig(config.model).admission) == ("prefix", "arrival")
    for name in get_args(AdmissionName):
        assert len(ADMISSIONS[name]()) == 0


@pytest.mark.parametrize("dtype", with_long(["float32"], ["bfloat16"]))
def test_a_resumed_run_keeps_its_rows_and_in_fp32_is_the_file_of_one_run(
    tmp_path: Path, dtype: str
) -> None:
    """Lines are greedy and seeded, cut off within a row; bf16 only guarantees the existing rows."""
    requests = [
        json.loads(line) | {"custom_id": f"{seed}-{number}"}
        for seed in (None, 7)
        for number, line in enumerate(EXAMPLE.read_text().splitlines())
    ]
    for one in requests[len(requests) // 2 :]:
        one["body"] |= {"temperature": 1.0, "seed": 7}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, requests)))
    given = ["-i", f"{tmp_path}/in.jsonl", "--dtype", dtype, "--device", "cpu"]
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    assert main(["run", *given, "-o", str(whole)]) == 0
    torn = whole.read_bytes()[: whole.stat().st_size * 2 // 3]
    resumed.write_bytes(torn)
    assert main(["run", *given, "-o", str(resumed), "--resume"]) == 0
    assert resumed.read_bytes().startswith(torn[: torn.rindex(b"\n") + 1])
    assert [row["id"] for row in rows(resumed)] == [row["id"] for row in rows(whole)]
    if dtype == "float32":
        assert resumed.read_bytes() == whole.read_bytes()


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
    stderr = capfd.readouterr().err.splitlines()
    assert stderr[-1].startswith(f"tidemill: {model}: its weights lack lm_head.weight, ")
    assert stderr[-1].endswith("or config.json belongs to another model.")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_modules_hold_is_never_looked_at_for_garbage(tmp_path: Path) -> None:
    """After a load, even a failed one, the collector skips torch's objects."""
    script = (
        "import gc\n"
        "from tidemill.offline.engine.engine import load_engine\n"
        "from tidemill.engine.config import EngineConfig\n"
        "from tidemill.engine.errors import EngineError\n"
        "try:\n"
        f"    load_engine(EngineConfig({str(tmp_path)!r}), served_names=(), chat_template=None)\n"
        "except EngineError:\n"
        "    print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert process.stdout.split() == ["True", "True"]
