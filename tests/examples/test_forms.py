"""`examples/structured.jsonl` and `examples/tools.jsonl` through one `tidemill run`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.examples.runs import EXAMPLES, bodies_of, lines_of
from tidemill import demo


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the one choice of each row of both files."""
    folder = tmp_path_factory.mktemp("forms")
    names = ("structured.jsonl", "tools.jsonl")
    both = folder / "both.jsonl"
    both.write_text("".join((EXAMPLES / name).read_text() for name in names))
    bodies = bodies_of(both, demo.MODEL_PATH, demo.NAME, folder)
    return {custom_id: body["choices"][0] for custom_id, body in bodies.items()}


def of_file(name: str, rows: dict[str, Any]) -> dict[str, Any]:
    """Return the choices of one file's lines."""
    return {line["custom_id"]: rows[line["custom_id"]] for line in lines_of(name)}


def test_each_answer_has_the_form_of_its_line(rows: dict[str, Any]) -> None:
    """A schema, choices, a regular expression; each line has its own."""
    choices = of_file("structured.jsonl", rows)
    texts = {
        name: choice["message"]["content"] if "message" in choice else choice["text"]
        for name, choice in choices.items()
    }
    for name, fields in (
        ("schema", {"name": str, "city": str}),
        ("schema-of-numbers", {"name": str, "age": int}),
    ):
        answer = json.loads(texts[name])
        assert {field: type(value) for field, value in answer.items()} == fields
    assert json.loads(texts["schema-of-an-enum"])["country"] in ("Portugal", "Spain")
    assert isinstance(json.loads(texts["object"]), dict)
    assert texts["choice"] in ("Paris", "Rome")
    assert re.fullmatch("[0-9]{1,3}", texts["regex"])
    assert texts["completion"] in (" cold", " warm", " loud")


def test_calls_come_where_they_must_and_nowhere_else(rows: dict[str, Any]) -> None:
    """By the right names, with arguments of their schemas."""
    choices = of_file("tools.jsonl", rows)
    for name in ("required", "named"):
        assert choices[name]["finish_reason"] == "tool_calls"
    called = [call["function"] for call in choices["required"]["message"]["tool_calls"]]
    assert {call["name"] for call in called} <= {"weather", "tide"}
    [call] = choices["named"]["message"]["tool_calls"]
    assert call["function"]["name"] == "tide"
    assert isinstance(json.loads(call["function"]["arguments"])["is_high"], bool)
    for name in ("auto", "none", "after-a-call"):
        assert not choices[name]["message"].get("tool_calls")
        assert choices[name]["message"]["content"]
    assert choices["none"]["message"]["content"] == "Paris"
