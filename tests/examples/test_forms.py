"""`examples/structured.jsonl` and `examples/tools.jsonl` through `tidemill run`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.examples.runs import bodies_of
from tidemill import demo


def choices_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the one choice of each row."""
    bodies = bodies_of(name, demo.MODEL_PATH, demo.NAME, folder)
    return {custom_id: body["choices"][0] for custom_id, body in bodies.items()}


def test_each_answer_has_the_form_of_its_line(tmp_path: Path) -> None:
    """A schema, choices, a regular expression; each line has its own."""
    choices = choices_of("structured.jsonl", tmp_path)
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


def test_calls_come_where_they_must_and_nowhere_else(tmp_path: Path) -> None:
    """By the right names, with arguments of their schemas."""
    choices = choices_of("tools.jsonl", tmp_path)
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
