"""Recipe of a table in the bucket: its object's user metadata, or a file next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..calibration.answers import CalibrationError
from ..object_keys import CALIBRATION_SUFFIX
from .errors import RecipeError
from .recipe import load_recipe
from .recipe_keys import CALIBRATION

MAX_BYTES: Final = 2**16
"""Limit of a recipe, and of the saved calibration that it names, without its report."""

MAX_CALIBRATION_BYTES: Final = 2**20
_TEXTS: Final = (
    *("url", "prompt", "system", "id", "output", "vectors", "question_layout"),
    *(*CALIBRATION, "escalate", "escalate_by"),
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


def calibration_name(keys: Mapping[str, Any]) -> str | None:
    """Return the file name in the key `calibration`; None without one.

    Raises RecipeError for the name of another file.
    """
    name = keys.get("calibration")
    if not isinstance(name, str):
        return None
    if "/" in name or not name.endswith(CALIBRATION_SUFFIX):
        raise RecipeError(
            f"`calibration` is {name!r}: it must be the name of a {CALIBRATION_SUFFIX} file in the "
            "folder of the table"
        )
    return name


def calibration_of_file(name: str, data: bytes) -> dict[str, Any]:
    """Return a saved calibration as a value of a recipe, without its report; raises RecipeError."""
    if len(data) > MAX_CALIBRATION_BYTES:
        raise RecipeError(f"`calibration` {name} is longer than {MAX_CALIBRATION_BYTES:,} bytes")
    from ..calibration.calibration import Calibration  # late: few recipes have one

    try:
        found = Calibration.parse(data).as_json()
    except CalibrationError as exc:
        raise RecipeError(f"`calibration` {name} cannot be used: {exc}") from exc
    if (size := len(json.dumps(found))) > MAX_BYTES:
        raise RecipeError(
            f"`calibration` {name} has {size:,} bytes without its report, more than {MAX_BYTES:,}: "
            "use one of `platt` or `batch`, which are short"
        )
    return found


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
