"""Recipe of a dropped table: a file beside it, or the user metadata of its object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .errors import RecipeError
from .recipe import load_recipe

PREFIX: Final = "recipe-"
"""Begins the names of user metadata that are keys of a recipe."""

MAX_BYTES: Final = 2**16
_LISTS = ("keep",)
_TEXTS = ("url", "prompt", "system", "id", "output", "vectors")


def drop_recipe(beside: bytes | None, metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the keys of a recipe: those of the file beside a table, metadata before it.

    None where neither has any. Raises RecipeError for one that cannot work.
    """
    keys: dict[str, Any] = {}
    if beside is not None:
        if len(beside) > MAX_BYTES:
            raise RecipeError(f"it is longer than {MAX_BYTES:,} bytes")
        try:
            keys = load_recipe(beside.decode())
        except UnicodeDecodeError as exc:
            raise RecipeError("it is not UTF-8") from exc
    given = {
        name.removeprefix(PREFIX): text
        for name, text in metadata.items()
        if name.startswith(PREFIX)
    }
    if beside is None and not given:
        return None
    if "prompt" in given:
        keys.pop("messages", None)
    keys |= {name: _value(name, text) for name, text in given.items()}
    return keys


def _value(name: str, text: str) -> Any:
    """Return the value of a key whose text stands in metadata: a name, names by commas, or JSON."""
    if name in _TEXTS:
        return text
    if name in _LISTS:
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text)
    except ValueError as exc:
        raise RecipeError(f"`{PREFIX}{name}` must be JSON") from exc
