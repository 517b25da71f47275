"""Questions about the rows of a table, through `tidemill run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tidemill.cli.main import main
from tidemill.offline.console.errors import Refused
from tidemill.offline.rows.table_outputs import open_outputs

ASK = (
    *("--ask", "damaged: Is something broken?"),
    *("--ask", "team = billing|shipping|security: Which team?"),
    *("--ask", "tone = calm<annoyed<furious: How upset is the customer?"),
)
QUESTIONS = ["damaged", "team", "tone"]
REPLY = (
    '{answers = [{type = "predicate", name = "x", probability = 0.75}], diagnostics = '
    "[{name = 'x', label_mass = 0.05, argmax_is_label = false}], usage = {input_tokens = 3}}"
)


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    """Return a table of tickets; the last one is empty."""
    path = tmp_path / "tickets.csv"
    path.write_text("id,ticket\nt1,My lamp is broken.\nt2,You charged me twice.\nt3,\n")
    return path


def test_a_csv_is_decided_by_one_command(tickets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question has typed columns; the card has the answers' distributions; Parquet agrees."""
    given = [*ASK, "--id", "id", "--on-invalid-line", "skip"]
    assert main(["run", str(tickets), *given, "--card-markdown"]) == 0
    header = tickets.with_name("tickets.output.csv").read_text().split("\n")[0]
    assert header == (
        "id,ticket,damaged,damaged_confidence,damaged_probabilities,team,team_confidence,"
        "team_probabilities,tone,tone_score,tone_confidence,tone_probabilities,usage,error"
    )
    other = tickets.with_name("other.parquet")
    assert main(["run", str(tickets), *given, "-o", str(other)]) == 0
    first, second, failed = pq.read_table(other).to_pylist()
    for row in (first, second):
        for name in QUESTIONS:
            shares = row[f"{name}_probabilities"]
            assert sum(shares.values()) == pytest.approx(1)
            assert row[f"{name}_confidence"] == max(shares.values())
        assert row["damaged"] is (row["damaged_probabilities"]["true"] >= 0.5)
        assert row["team_probabilities"][row["team"]] == row["team_confidence"]
        assert 0 <= row["tone_score"] <= 2
    assert failed["damaged"] is None
    assert "all cells of the row are empty" in failed["error"]
    card = json.loads(tickets.with_name("tickets.output.card.json").read_text())
    assert [(one["name"], one["rows"]) for one in card["questions"]] == [(n, 2) for n in QUESTIONS]
    assert card["recipe"]["question_layout"] == "questions_first"
    shown = tickets.with_name("tickets.output.card.md").read_text()
    assert "Prompts: questions_first, 1 order of the options\n" in shown
    assert "| `damaged` | true " in shown
    with open_outputs(str(other), id_column="id", tmp_dir=None) as rows:
        bodies = [row.body for _, row in rows.rows()]
    assert [one["name"] for one in (bodies[0] or {})["answers"]] == QUESTIONS
    assert bodies[2] is None
    capsys.readouterr()
    assert main(["diff", str(tickets.with_name("tickets.output.csv")), str(other)]) == 0
    assert "of 2 with an answer in both, 2 are identical" in capsys.readouterr().out


def test_the_card_of_a_joined_run_counts_all_rows(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are counted when the table is written; a question with a wording fault is named."""
    run.has_card = True
    source = tmp_path / "t.jsonl"
    source.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(5)))
    (tmp_path / "t.recipe.toml").write_text(f"ask = ['x: Is it?']\nparams.reply = {REPLY}\n")
    for shard in ("1/2", "2/2"):
        assert run(source, "-o", tmp_path / "t.csv", "--shard", shard) == 0
    assert main(["join", str(tmp_path / "t.csv.rows.jsonl")]) == 0
    assert run(source, "-o", tmp_path / "t.csv", "--resume") == 0
    [question] = json.loads((tmp_path / "t.card.json").read_text())["questions"]
    assert (question["rows"], question["values"]) == (5, {"true": 5, "false": 0})
    assert "warning: question `x`: 100% of rows put less than 10%" in capsys.readouterr().err


def test_rows_of_other_questions_are_not_kept(run: Any, tickets: Path, tmp_path: Path) -> None:
    """The layout is a setting, too, although it is not typed."""
    recipe = tmp_path / "tickets.recipe.toml"
    recipe.write_text(
        f"ask = ['x: Is it?']\nprompt = '{{{{ ticket or 0 }}}}'\nparams.reply = {REPLY}\n"
    )
    assert run(tickets, "-o", tmp_path / "t.csv", "--shard", "1/2") == 0
    with pytest.raises(Refused, match=r"--ask: .*Is it\?.* before, .*Is this\?.* now"):
        run(tickets, "-o", tmp_path / "t.csv", "--shard", "1/2", "--resume", "--ask", "x: Is this?")
    with pytest.raises(Refused, match=r"--question-layout: questions_first before, row_first now"):
        run(
            *(tickets, "-o", tmp_path / "t.csv", "--shard", "1/2", "--resume"),
            *("--question-layout", "row_first"),
        )
