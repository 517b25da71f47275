"""Custom tools: functions whose only argument is a text, `input`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from ..constraints.look_ahead import has_unmatched_parenthesis
from ..errors import RequestError
from ..validation import has_open_escape, short_repr

_OWN_FIELDS = ("type", "format", "parameters", "strict")


def chat_function(place: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as the function of a chat; raises `RequestError` for its format."""
    pattern = _pattern(f"tools.{place}.format", tool.get("format"))
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {name: value for name, value in tool.items() if name not in _OWN_FIELDS}
    if pattern is not None:
        function["strict"] = True
    return {**function, "parameters": parameters}


def arguments_of(text: str) -> str:
    """Return the function's arguments for a text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the text in the function's arguments, or the arguments if the model wrote others.

    Truncated arguments have the beginning of the text.
    """
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get("input", None if value else "") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _pattern(param: str, given: object) -> str | None:
    """Return the regular expression of a tool's format; None for any text."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError(f"`{param}` must be an object; got {short_repr(given)}.", param=param)
    if given.get("type") == "text":
        return None
    syntax, definition = given.get("syntax"), given.get("definition")
    name, allowed, value = "type", "'text' or 'grammar'", given.get("type")
    if value == "grammar":
        name, allowed, value = "syntax", "'regex': other grammars are not supported", syntax
        if syntax == "regex":
            if isinstance(definition, str) and definition and not has_open_escape(definition):
                if has_unmatched_parenthesis(definition):
                    raise RequestError(
                        f"`{param}.definition` has an unmatched parenthesis;"
                        f" got {short_repr(definition)}.",
                        param=f"{param}.definition",
                    )
                return f"^(?:{definition})$"
            name, allowed, value = "definition", "a regular expression", definition
    param = f"{param}.{name}"
    raise RequestError(f"`{param}` must be {allowed}; got {short_repr(value)}.", param=param)
