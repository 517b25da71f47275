"""Which model a request means, of the names that one model is served under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.protocol.errors import ModelNotFound, RequestError
from engine.protocol.validation import printable, shown

ANY_MODEL = "*"
"""Among the served names: every name means the model."""

_MAX_NAME_CHARS = 200


def name_of_model(body: Mapping[str, Any], served_names: Sequence[str]) -> str:
    """Return the name that the reply shows: the one asked for, or the first that is served.

    Raises `ModelNotFound` for a name that is not served, `RequestError` for what is no name.
    """
    name = body.get("model")
    if name is None:
        return own_names(served_names)[0]
    if not isinstance(name, str):
        raise RequestError(f"`model` must be a string; got {shown(name)}.", param="model")
    if name not in served_names and ANY_MODEL not in served_names:
        raise ModelNotFound(printable(name, _MAX_NAME_CHARS), served_names)
    return name


def model_of(name: str, models: Mapping[str, str]) -> str | None:
    """Return the model that a name means, or None; `ANY_MODEL` among the names takes the rest."""
    return models.get(name) or models.get(ANY_MODEL)


def own_names(served_names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are names: all but `ANY_MODEL`."""
    return tuple(name for name in served_names if name != ANY_MODEL)
