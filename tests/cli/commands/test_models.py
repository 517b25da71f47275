"""`tidemill models`: one model's report, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidemill import demo
from tidemill.cli.main import main

MODEL = str(demo.MODEL_PATH)


def test_a_report_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Both have the same content."""
    assert main(["models", MODEL, "--device", "cpu", "--dtype", "float32"]) == 0
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert main(["models", MODEL, "--device", "cpu", "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert table["runs"].strip().startswith("by the engine's own network")
    assert (report["runs"], report["model_type"], report["dtype"]) == ("native", "qwen3", "float32")
    assert f"{report['kv_bytes_per_token']:,} bytes per token" in table["KV cache"]
    assert f"{report['weight_bytes'] / 1e6:,.1f} MB as float32 on cpu" in table["weights"]
    assert table["tool calls"].strip() == report["tool_call_parser"] == "hermes"
    assert table["endpoints"].strip() == ", ".join(report["endpoints"])
    assert report["endpoints"][:2] == ["/v1/chat/completions", "/v1/responses"]
    assert (table["drafts"].strip(), report["takes_drafts"]) == ("n-grams", True)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--no-speculative-decoding"], "no: --no-speculative-decoding"),
        (["--device", "cuda"], "no: a GPU prepares the next step before a draft could be looked "),
    ],
)
def test_a_report_says_why_nothing_would_be_drafted(
    flags: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag turns drafts off, and so does a device that runs steps ahead."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["models", MODEL, *flags]) == 0
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert table["drafts"].strip().startswith(why)


def test_a_model_that_would_be_refused_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is part of the report."""
    (tmp_path / "config.json").write_text("{")
    assert main(["models", str(tmp_path)]) == 1
    assert "refused  " in capsys.readouterr().out
    assert main(["models", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["runs"], report["weight_bytes"]) == ("refused", None)
    assert "config.json is truncated or not valid JSON" in report["why"]


def test_a_gpu_of_another_machine_can_be_planned_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens fit there nothing here can tell."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["models", MODEL, "--device", "cuda"]) == 0
    stdout = capsys.readouterr().out
    assert "MB as bfloat16 on cuda" in stdout
    assert "1,280 bytes per token; the number of tokens that fit depends on the GPU" in stdout


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "by the engine's own network (Qwen3ForCausalLM)"),
        ({"attention_chunk_size": 1}, "config.json has unsupported attention_chunk_size"),
    ],
)
def test_the_config_alone_determines_what_would_run_it(
    config: dict[str, int], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights the model is refused, and a separate row contains its network."""
    config_fields = json.loads((demo.MODEL_PATH / "config.json").read_bytes()) | config
    (tmp_path / "config.json").write_text(json.dumps(config_fields))
    assert main(["models", str(tmp_path), "--device", "cpu"]) == 1
    rows = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[:4]] == ["model", "refused", "refused", "would run"]
    assert words in rows[3][1]
    assert main(["models", str(tmp_path), "--device", "cpu", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] == "refused"
    assert report["plan_runs"] == ("transformers" if config else "native")
    assert (report["plan_why"] or "") == (words if config else "")


def test_fields_that_transformers_never_reads_are_ignored_with_one_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table and the JSON name them; the model keeps the engine's own network."""
    config_fields = json.loads((demo.MODEL_PATH / "config.json").read_bytes())
    config_fields |= {"unk_token_id": 0, "use_qk_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(config_fields))
    note = (
        "config.json: ignored unk_token_id and use_qk_norm, which transformers' Qwen3ForCausalLM "
        "never reads"
    )
    main(["models", str(tmp_path), "--device", "cpu"])
    rows = [line.split("  ", 1) for line in capsys.readouterr().out.splitlines()]
    assert [row[1].strip() for row in rows if row[0] == "note"] == [note]
    main(["models", str(tmp_path), "--device", "cpu", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["plan_runs"], report["notes"]) == ("native", [note])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], "no model: pass a folder"),
        (["/no/such/folder"], "folder not found"),
        (["s3://bucket/model"], "is in S3"),
        ([MODEL, "--tool-call-parser", "x"], "unknown parser 'x'"),
        ([MODEL, "--jsn"], "did you mean --json?"),
    ],
)
def test_what_cannot_work_ends_with_2(
    typed: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one sentence."""
    assert main(["models", *typed]) == 2
    assert words in capsys.readouterr().err
