"""Validation: parses a body as a request, and turns pydantic's errors into one clear message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .errors import RequestError

NeutralValues = Mapping[str, tuple[object, ...]]
"""Unsupported parameters, each with the values that change nothing."""

NOT_DISTINCT = "not_distinct"
"""Type of an error whose message contains the repeated value."""

_MAX_SHOWN_CHARS = 80
_TOO_MANY = "must not have more than"
_MAX_INT_BITS = 128
_WORDS = {True: "true", False: "false", None: "null"}
_INSTEAD = {"images": "send `messages` with `image_url` parts"}
"""Advice other than to remove an unsupported parameter."""

_Request = TypeVar("_Request", bound=BaseModel)


def parse(request_type: type[_Request], body: Mapping[str, Any]) -> _Request:
    """Return the body as a `request_type`, or raise `RequestError` for the first invalid field."""
    try:
        return request_type.model_validate(body)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    raise _request_error([dict(fault) for fault in faults])


def refuse_unsupported(body: Mapping[str, Any], neutral: NeutralValues) -> None:
    """Raise a `RequestError` with the name of the body's first unsupported parameter, if any.

    Values in `neutral` are allowed, and so are null and a `best_of` that equals `n`.
    """
    for name in sorted(body.keys() & neutral.keys()):
        value = body[name]
        if value is None or value in neutral[name]:
            continue
        allowed = " or ".join(json.dumps(item) for item in (None, *neutral[name]))
        raise _unsupported(name, value, allowed)
    best_of = body.get("best_of")
    choices = 1 if body.get("n") is None else body["n"]
    if best_of is not None and best_of != choices:
        raise _unsupported("best_of", best_of, "null, or the same as `n`")


def _unsupported(name: str, value: object, allowed: str) -> RequestError:
    advice = _INSTEAD.get(name) or f"remove it or send {allowed}"
    return RequestError(
        f"`{name}` is not supported: {advice}; got {short_repr(value)}.",
        param=name,
        code="unsupported_parameter",
    )


def short_repr(value: object) -> str:
    """Return a value of a body for an error message: short, and always printable."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool) or value is None:
        return _WORDS[value]
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        return "a very large integer"
    text = ascii(value[:_MAX_SHOWN_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def has_open_escape(pattern: str) -> bool:
    """Say whether a regular expression ends in a backslash that escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def printable(text: str, max_chars: int = 2_000) -> str:
    """Return the text without lone surrogates and of bounded length, so that it fits in any row."""
    text = text[: max_chars + 1].encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _request_error(faults: list[dict[str, Any]]) -> RequestError:
    first = faults[0]
    param = _dotted(first)
    message = f"`{param}` {predicate(first)}{_received(first)}"
    others = sorted({_dotted(fault) for fault in faults[1:]} - {param})
    if others:
        message += f" (also invalid: {', '.join(others[:5])}{', …' if len(others) > 5 else ''})"
    return RequestError(f"{message}.", param=param)


def _received(fault: Mapping[str, Any]) -> str:
    """Return the invalid value for an error message; empty if the message says enough."""
    kind, value = fault["type"], fault["input"]
    if kind in {"missing", "too_short", NOT_DISTINCT}:
        return ""
    is_long = kind == "too_long" or _TOO_MANY in fault["msg"]
    if is_long and isinstance(value, (dict, list)):
        return f"; got {len(value):,}"
    return f"; got {short_repr(value)}"


def _dotted(fault: Mapping[str, Any]) -> str:
    """Return an invalid field's path as `messages.0.content`, without names of union branches."""
    keys = [str(key) for key in fault["loc"]]
    branches = ("<", "function-", "list[")
    return ".".join(key for key in keys if key != "[key]" and not key.startswith(branches))


def predicate(fault: Mapping[str, Any]) -> str:
    """Return pydantic's or a validator's message, as a predicate that follows the field's name."""
    match fault["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is an unknown parameter"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be an object"
        case "list_type":
            return "must be a list"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long" | "string_too_long":
            # After one of our validators pydantic no longer knows that it measures a string.
            limit = f"{fault['ctx']['max_length']:,}"
            if isinstance(fault["input"], str):
                return f"must not be longer than {limit} characters"
            return f"must not have more than {limit} items"
    message = str(fault["msg"]).removeprefix("Value error, ")
    return message.replace("Input should ", "must ", 1)
