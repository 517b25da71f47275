"""Decisions in a file: checked, estimated, run, resumed and reused like any other line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import rows
from tidemill.cli.main import main
from tidemill.demo import MODEL_PATH, NAME

QUESTIONS = [
    {"type": "predicate", "instructions": "Is a city named?", "name": "city"},
    {"type": "choice", "instructions": "Which?", "choices": [{"value": True}, {"value": "x"}]},
]
CALLS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "In Paris."},
]
NOUL = {"type": "noul", "instructions": "Is a city named?"}
LINES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/decisions", {"input": "Paris is a city. " * 9, "questions": QUESTIONS}),
    ("/v1/decisions", {"input": "Paris is a city. " * 9, "questions": QUESTIONS}),
    (
        "/v1/decisions",
        {
            "model": NAME,
            "input": CALLS,
            "instructions": "Be strict.",
            "questions": QUESTIONS,
            "question_layout": "questions_first",
            "debias": 2,
            "seed": 7,
            "cache_salt": "a",
            "safety_identifier": "b",
        },
    ),
    ("/v1/systemone", {"state": {"city": "Paris"}, "questions": {"city": NOUL}}),
    ("/v1/decisions", {"input": "Paris", "questions": []}),
]


@pytest.fixture(name="source")
def fixture_source(tmp_path: Path) -> Path:
    """Return a file of decisions with and without optional fields, a repeat and a bad line."""
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}) + "\n"
            for i, (url, body) in enumerate(LINES)
        )
    )
    return source


def test_a_file_of_decisions_is_estimated_run_resumed_and_reused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No token is generated, and all runs write the same bytes."""
    model = ("--model", str(MODEL_PATH), "--served-model-name", NAME)
    assert main(["check", str(source)]) == 1
    assert "`questions` must not be empty" in capsys.readouterr().err
    assert main(["estimate", str(source), "--json", *model]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["output_tokens"], found["most_output_tokens"]) == (0, 0)
    assert (found["num_failing"], found["num_repeats"], found["num_unlimited"]) == (1, 1, 0)
    out, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    kept = ("--reuse", str(tmp_path / "kept"))
    assert main(["run", "-i", str(source), "-o", str(out), *model, *kept]) == 0
    bodies = [row["response"]["body"] for row in rows(out)]
    first, repeat, other, system_one, failed = bodies
    assert first["answers"] == repeat["answers"]
    assert [len(body["answers"]) for body in bodies[:4]] == [2, 2, 2, 1]
    assert 0 <= other["diagnostics"][1]["agreement"] <= 1
    assert system_one["answers"]["city"]["type"] == "noul"
    assert failed["error"]["param"] == "questions"
    # Of labels that are several tokens, a run also reads the later ones.
    counted = sum(body["usage"]["input_tokens"] for body in bodies[:4])
    assert counted - 40 <= found["prompt_tokens"] <= counted
    assert main(["run", "-i", str(source), "-o", str(again), *model, *kept]) == 0
    assert "4 rows of 5 reused" in capsys.readouterr().err
    assert again.read_bytes() == out.read_bytes()
    again.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]))
    assert main(["run", "-i", str(source), "-o", str(again), *model, "--resume"]) == 0
    assert again.read_bytes().count(b"\n") == 5
    answers = [row["response"]["body"].get("answers") for row in rows(again)]
    assert answers == [body.get("answers") for body in bodies]
    assert main(["view", str(out), "--grep", "city: "]) == 0
