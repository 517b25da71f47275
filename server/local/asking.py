"""What requests say in their urls, and what is not there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from engine.protocol.errors import RequestError
from engine.protocol.validation import printable

_ValueT = TypeVar("_ValueT")
_MAX_SHOWN_CHARS = 100


def number(asked: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    """Return a whole number that a request names; raises `RequestError` for any other."""
    text = asked.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not least <= int(text) <= most:
        raise RequestError(
            f"`{name}` must be a whole number from {least:,} to {most:,}.",
            param=name,
            code="invalid_parameter",
        )
    return int(text)


def chosen(
    asked: Mapping[str, str], name: str, values: Mapping[str, _ValueT], default: _ValueT
) -> _ValueT:
    """Return one of some values by its name; raises `RequestError` for any other."""
    text = asked.get(name)
    if text is None:
        return default
    if text not in values:
        raise RequestError(
            f"`{name}` must be {' or '.join(values)}.", param=name, code="invalid_parameter"
        )
    return values[text]


def not_found(what: str, name: str, param: str | None = None) -> RequestError:
    """Return the refusal of something that is not there."""
    return RequestError(
        f"There is no {what} {printable(name, _MAX_SHOWN_CHARS)}.",
        param=param,
        code=f"{what}_not_found",
        status_code=404,
        type="not_found_error",
    )
