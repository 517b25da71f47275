"""Fields that both formats of a decision's body have."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ..chat import free_names
from ..errors import RequestError
from ..fields import Text, Whole, encodable
from .questions import MAX_ORDERS

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


Filled = Annotated[Text, Field(min_length=1)]
NumOrders = Annotated[Whole, Field(ge=1, le=MAX_ORDERS)]
TemplateVariables = Annotated[
    dict[str, Any], AfterValidator(free_names), AfterValidator(without_thinking)
]


def text_of_json(value: object, path: str) -> str:
    """Return a JSON value as the model reads it: a string unchanged, anything else as JSON.

    Raises `RequestError` naming `path` for a value that cannot be sent as text.
    """
    try:
        text = value if isinstance(value, str) else _json(value)
    except RecursionError:
        raise RequestError(f"`{path}` is nested too deeply.", param=path) from None
    return checked_text(text, path)


def _json(value: object) -> str:
    """Return a value as JSON; other threads run while a large one is printed."""
    encoder = json.JSONEncoder(ensure_ascii=False)
    return "".join(encoder.iterencode(value)) if _is_large(value) else encoder.encode(value)


def _is_large(value: object) -> bool:
    num_values, containers = 0, [value]
    for container in containers:  # which grows by those inside
        if isinstance(container, (dict, list)):
            num_values += len(container)
            if num_values > _MANY_VALUES:
                return True
            inside = container.values() if isinstance(container, dict) else container
            containers += (item for item in inside if isinstance(item, (dict, list)))
    return False
