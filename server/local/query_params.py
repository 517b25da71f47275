"""Query parameters and request models: parsed, or refused as `RequestError`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from tidemill.batch.errors import InvalidOption
from tidemill.protocol.errors import RequestError
from tidemill.protocol.validation import predicate, printable

_ValueT = TypeVar("_ValueT")
_ModelT = TypeVar("_ModelT", bound=BaseModel)
_MAX_SHOWN_CHARS = 100
_MAX_PARAM_CHARS = 200


def int_param(params: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    """Return an integer parameter within bounds; raises `RequestError`."""
    text = params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not least <= int(text) <= most:
        raise RequestError(
            f"`{name}` must be an integer between {least:,} and {most:,}.",
            param=name,
            code="invalid_parameter",
        )
    return int(text)


def choice_param(
    params: Mapping[str, str], name: str, values: Mapping[str, _ValueT], default: _ValueT
) -> _ValueT:
    """Return the value that a parameter names; raises `RequestError` for other names."""
    text = params.get(name)
    if text is None:
        return default
    if text not in values:
        raise RequestError(
            f"`{name}` must be one of {', '.join(values)}.", param=name, code="invalid_parameter"
        )
    return values[text]


def not_found(what: str, name: str, param: str | None = None) -> RequestError:
    """Return the 404 for an unknown id."""
    return RequestError(
        f"No such {what}: {printable(name, _MAX_SHOWN_CHARS)}.",
        param=param,
        code=f"{what}_not_found",
        status_code=404,
        type="not_found_error",
    )


def parse_model(kind: type[_ModelT], body: Mapping[str, object]) -> _ModelT:
    """Return a body as a pydantic model; raises `RequestError` with the first error."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        fault = exc.errors()[0]
        where = ".".join(map(str, fault["loc"]))[:_MAX_PARAM_CHARS]
        message = f"`{where}` {predicate(fault)}."
        raise RequestError(message, param=where, code="invalid_parameter") from exc


@contextmanager
def options_as_request_errors() -> Iterator[None]:
    """Turn an InvalidOption raised inside into a `RequestError`."""
    try:
        yield
    except InvalidOption as exc:
        raise RequestError(exc.message, param=exc.param, code=exc.code) from exc
