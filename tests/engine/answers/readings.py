"""Answers of a model that has three tools, read in any form."""

from __future__ import annotations

from typing import Any

from engine.answers.answer import Answer, read
from engine.answers.forms import forms_of
from engine.answers.reading import FormedReading

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "why": {}},
    },
    "time.now": {"type": "object"},
}
PARIS = '{"city": "Paris"}'
TIME = '{"name": "time.now", "arguments": {}}'


def reading(
    calls: str = "none", thinking: str = "none", *, is_open: bool = False, **options: Any
) -> FormedReading:
    """Return how answers in these forms are read."""
    forms = forms_of(None, calls=calls, thinking=thinking)
    return FormedReading(forms, "req_1", is_open=is_open, tools=TOOLS, **options)


def said(text: str, calls: str = "none", thinking: str = "none", **options: Any) -> Answer:
    """Return what a text says in these forms."""
    return read(reading(calls, thinking, **options).reader(0), text)


def calls_of(answer: Answer) -> list[tuple[str, str]]:
    """Return names and arguments."""
    return [(call.name, call.arguments) for call in answer.calls]
