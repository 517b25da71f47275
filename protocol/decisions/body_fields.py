"""Fields that both formats of a decision's body have."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ..chat import free_names
from ..errors import RequestError
from ..fields import Text, Whole, encodable
from .questions import MAX_ORDERS

MAX_DEPTH = 200  # as in a line of a batch file
_MANY_VALUES = 10_000
_THINKING = frozenset({"enable_thinking", "thinking", "thinking_budget"})


def checked_text(text: str, path: str) -> str:
    """Return the text; raise `RequestError` naming `path` if UTF-8 cannot encode it."""
    try:
        return encodable(text)
    except ValueError as exc:
        raise RequestError(f"`{path}` {exc}.", param=path) from None


def without_thinking(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the template variables without the switches of thinking, which is always off.

    Raises ValueError for one that turns thinking on.
    """
    for name in sorted(variables.keys() & _THINKING):
        if variables[name]:
            raise ValueError(
                f"must not set `{name}`: decisions are read from the first token of the answer, "
                "without thinking"
            )
    rest = variables.keys() - _THINKING
    return {name: value for name, value in variables.items() if name in rest}


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


Filled = Annotated[Text, Field(min_length=1)]
OptionText = Annotated[Filled, AfterValidator(_not_blank)]
NumOrders = Annotated[Whole, Field(ge=1, le=MAX_ORDERS)]
TemplateVariables = Annotated[
    dict[str, Any], AfterValidator(free_names), AfterValidator(without_thinking)
]


def text_of_json(value: object, path: str) -> str:
    """Return a JSON value as the model reads it: a string unchanged, anything else as JSON.

    Raises `RequestError` naming `path` for a value that cannot be sent as text.
    """
    return checked_text(value if isinstance(value, str) else _json(value, path), path)


def _json(value: object, path: str) -> str:
    """Return a value as JSON; other threads run while a large one is printed."""
    encoder = json.JSONEncoder(ensure_ascii=False)
    is_large = _num_values(value, path) > _MANY_VALUES
    return "".join(encoder.iterencode(value)) if is_large else encoder.encode(value)


def _num_values(value: object, path: str) -> int:
    """Return how many values are inside; raise `RequestError` for one nested too deeply."""
    num_values, depth, level = 0, 0, [value]
    while level:
        inside = [
            item
            for container in level
            if isinstance(container, (dict, list))
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        level = [item for item in inside if isinstance(item, (dict, list))]
        num_values, depth = num_values + len(inside), depth + 1
        if level and depth >= MAX_DEPTH:
            raise RequestError(
                f"`{path}` is nested too deeply: the limit is {MAX_DEPTH} levels.", param=path
            )
    return num_values
