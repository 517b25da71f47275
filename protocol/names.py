"""Served model names: resolves the `model` of a request to one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ModelNotFound, RequestError
from .validation import printable, short_repr

ANY_MODEL = "*"
"""Wildcard among the served names: any name resolves to the model."""

_MAX_NAME_CHARS = 200


def name_of_model(body: Mapping[str, Any], served_names: Sequence[str]) -> str:
    """Return the `model` of the reply: the one in the request, or else the first served name.

    Raises `ModelNotFound` for a name that is not served, `RequestError` if it is not a string.
    """
    name = body.get("model")
    if name is None:
        return own_names(served_names)[0]
    if not isinstance(name, str):
        raise RequestError(f"`model` must be a string; got {short_repr(name)}.", param="model")
    if name not in served_names and ANY_MODEL not in served_names:
        raise ModelNotFound(printable(name, _MAX_NAME_CHARS), served_names)
    return name


def model_of(name: str, models: Mapping[str, str]) -> str | None:
    """Return the model with this name, or None; `ANY_MODEL` matches every other name."""
    return models.get(name) or models.get(ANY_MODEL)


def own_names(served_names: Sequence[str]) -> tuple[str, ...]:
    """Return the served names without `ANY_MODEL`."""
    return tuple(name for name in served_names if name != ANY_MODEL)
