"""Parameters of requests, in their urls and bodies, and refusals of what is not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from engine.protocol.errors import RequestError
from engine.protocol.validation import printable
from handler.errors import InvalidOption

_ValueT = TypeVar("_ValueT")
_ModelT = TypeVar("_ModelT", bound=BaseModel)
_MAX_SHOWN_CHARS = 100
_MAX_PARAM_CHARS = 200


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


def validated(kind: type[_ModelT], body: Mapping[str, object]) -> _ModelT:
    """Return a body as what it must be; raises `RequestError`, which names what is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        found = exc.errors()[0]
        where = ".".join(map(str, found["loc"]))[:_MAX_PARAM_CHARS]
        message = f"`{where}`: {found['msg']}."
        raise RequestError(message, param=where, code="invalid_parameter") from exc


@contextmanager
def refusing_options() -> Iterator[None]:
    """Raise `RequestError` for an InvalidOption that is raised inside."""
    try:
        yield
    except InvalidOption as exc:
        raise RequestError(exc.message, param=exc.param, code=exc.code) from exc
