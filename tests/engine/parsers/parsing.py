"""Answers of a model with three tools, parsed in any format."""

from __future__ import annotations

from typing import Any

from tidemill.engine.parsers.output_parser import ModelOutputParser
from tidemill.engine.parsers.parsed_output import ParsedMessage, parse_text
from tidemill.engine.parsers.registry import select_parsers

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
) -> ModelOutputParser:
    """Return the parser of answers in these formats."""
    parsers = select_parsers(None, tool_calls=calls, reasoning=thinking)
    return ModelOutputParser(parsers, "req_1", is_open=is_open, tools=TOOLS, **options)


def parsed(text: str, calls: str = "none", thinking: str = "none", **options: Any) -> ParsedMessage:
    """Return the parsed message of a text in these formats."""
    return parse_text(reading(calls, thinking, **options).for_choice(0), text)


def calls_of(answer: ParsedMessage) -> list[tuple[str, str]]:
    """Return the names and arguments of calls."""
    return [(call.name, call.arguments) for call in answer.calls]
