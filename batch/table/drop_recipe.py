"""Recipe of a dropped table: a file beside it, or the user metadata of its object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from .errors import RecipeError
from .recipe import SUFFIX, load_recipe, parse_recipe

PREFIX: Final = "recipe-"
"""Begins the names of user metadata that are keys of a recipe."""

MAX_BYTES: Final = 2**16
_LISTS = ("keep",)
_TEXTS = ("url", "prompt", "system", "id", "output", "vectors")


def recipe_key(key: str) -> str:
    """Return the key of the recipe beside a table: its own with another ending."""
    path = PurePosixPath(key.removesuffix(".gz"))
    return str(path.with_name(f"{path.stem}{SUFFIX}"))


def is_recipe_key(key: str) -> bool:
    """Say whether an upload is a recipe, which is no file of requests."""
    return key.endswith(SUFFIX)


def has_recipe(metadata: Mapping[str, str]) -> bool:
    """Say whether user metadata has keys of a recipe."""
    return any(name.startswith(PREFIX) for name in metadata)


def drop_recipe(beside: bytes | None, metadata: Mapping[str, str]) -> str:
    """Return the keys of a recipe as JSON: those of the file beside a table, metadata before it.

    Raises RecipeError for one that cannot work.
    """
    keys: dict[str, Any] = {}
    if beside is not None and len(beside) > MAX_BYTES:
        raise RecipeError(f"it is longer than {MAX_BYTES:,} bytes")
    if beside is not None:
        try:
            keys = load_recipe(beside.decode())
        except UnicodeDecodeError as exc:
            raise RecipeError("it is not UTF-8") from exc
    given = {
        name.removeprefix(PREFIX): text
        for name, text in metadata.items()
        if name.startswith(PREFIX)
    }
    if "prompt" in given:
        keys.pop("messages", None)
    keys |= {name: _value(name, text) for name, text in given.items()}
    parse_recipe(keys)
    try:
        return json.dumps(keys, ensure_ascii=False)
    except TypeError as exc:
        raise RecipeError("dates and times have no place in it: write them as text") from exc


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
