"""The run card next to an output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line
from tidemill.offline.files.paths import card_path

Write = Callable[..., Path]


@pytest.fixture
def run(run: Any) -> Any:
    """Run with a card."""
    run.has_card = True
    return run


def test_a_card_says_what_a_run_did(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, tokens, errors, the model, and settings that are not the defaults; twice."""
    source = write_input(line("a"), line("b"), line("c", status=404), line("d", **{"raise": "x"}))
    flags = ["--max-inflight", "2", "--temperature", "0", "--price-per-hour", "3600"]
    flags.append("--card-markdown")
    assert run("-i", source, "-o", tmp_path / "rows.jsonl", *flags) == 0
    card = json.loads((tmp_path / "rows.card.json").read_text())
    assert card["rows"] == {
        "total": 4,
        "ok": 2,
        "failed": 2,
        "truncated": 0,
        "kept": 0,
        "reused": 0,
        "not_run": 0,
    }
    assert card["tokens"] == {"prompt": 20, "cached": 8, "completion": 6, "reasoning": 0}
    assert card["lengths"]["completion"][-1] == {"least": 2, "most": 3, "count": 2}
    assert {kind["message"].split(":")[0] for kind in card["errors"]} == {
        "No /v1/chat/completions.",
        "The engine failed on this request",
    }
    assert card["cost"] == pytest.approx(card["seconds"] + card["load_seconds"], abs=0.01)
    assert (card["model"]["name"], card["model"]["digest"]) == ("scripted", "d1")
    assert card["settings"] == {"max_inflight": 2, "defaults": {"temperature": 0.0}}
    engine, host = (card["seconds_by_cause"][name] for name in ("engine", "host"))
    assert (engine["launching"], engine["waiting_for_requests"]) == (3, 0)  # as scripted
    assert [*host] == ["tokenizing", "detokenizing", "printing", "writing", "other"]
    assert sum(host.values()) == pytest.approx(card["seconds"], rel=0.05, abs=0.05)
    names = f"{tmp_path}/rows.card.json and {tmp_path}/rows.card.md"
    assert f"the run card is {names}\n" in capsys.readouterr().err
    shown = (tmp_path / "rows.card.md").read_text()
    assert shown.startswith(f"# {source}\n")
    assert "| rows | 4 rows: 2 ok, 2 failed |" in shown
    assert "| digest | d1 |" in shown
    assert "| engine | launching | 3.0 | 100.0% |" in shown
    assert "- 1 × No /v1/chat/completions." in shown


def test_a_resumed_run_counts_kept_rows_separately(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its token counts exclude kept rows, and the card is the only file next to the output."""
    source, out = write_input(line("a"), line("b", status=404)), tmp_path / "rows.jsonl"
    assert run("-i", source, "-o", out) == 0
    assert run("-i", source, "-o", out, "--resume", "--retry-failed") == 0
    card = json.loads((tmp_path / "rows.card.json").read_text())
    assert (card["rows"]["ok"], card["rows"]["failed"], card["rows"]["kept"]) == (1, 1, 1)
    assert card["tokens"]["prompt"] == 0
    assert f"the run card is {tmp_path}/rows.card.json\n" in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == {source, out, tmp_path / "rows.card.json"}


def test_standard_output_has_no_card(run: Any, write_input: Write, tmp_path: Path) -> None:
    """Neither has a run with --no-card."""
    source = write_input(line("a"))
    assert run("-i", source, "-o", "-") == 0
    assert run("-i", source, "-o", tmp_path / "rows.jsonl", "--no-card") == 0
    assert {*tmp_path.iterdir()} == {source, tmp_path / "rows.jsonl"}


def test_a_card_that_cannot_be_written_is_a_note(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are there all the same."""
    (tmp_path / "rows.card.json").mkdir()
    assert run("-i", write_input(line("a")), "-o", tmp_path / "rows.jsonl") == 0
    assert "note: the run card cannot be written (Is a directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "card"),
    [
        ("a/x.output.jsonl", "a/x.output.card.json"),
        ("x.parquet", "x.card.json"),
        ("rows", "rows.card.json"),
        ("x.jsonl.3-of-8", "x.jsonl.3-of-8.card.json"),
    ],
)
def test_a_card_has_the_name_of_its_output(output: str, card: str) -> None:
    """The name omits the suffix of a format."""
    assert str(card_path(Path(output))) == card
