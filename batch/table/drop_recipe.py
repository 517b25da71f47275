"""Recipe of a table in the bucket: its object's user metadata, or a file next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from .errors import RecipeError
from .recipe import load_recipe

MAX_BYTES: Final = 2**16
_TEXTS: Final = (
    *("url", "prompt", "system", "id", "output", "vectors", "question_layout"),
    *("calibrate", "prior", "gold", "escalate"),
)


def recipe_of_metadata(user_metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of a recipe in user metadata; raises RecipeError."""
    return {name: _value(name, text) for name, text in user_metadata.items()}


def recipe_of_file(data: bytes) -> dict[str, Any]:
    """Return the keys of a recipe file; raises RecipeError for an invalid one."""
    if len(data) > MAX_BYTES:
        raise RecipeError(f"it is longer than {MAX_BYTES:,} bytes")
    try:
        return load_recipe(data.decode())
    except UnicodeDecodeError as exc:
        raise RecipeError("it is not UTF-8") from exc


def _value(name: str, text: str) -> Any:
    """Return a key's value from its text in metadata: a text, comma-separated names, or JSON."""
    if name in _TEXTS:
        return text
    if name in {"keep", "labels"}:
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RecipeError(f"`recipe-{name}` must be JSON") from exc
