"""Recipe of a dataset: read from a file and keywords, and validated against its columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import load_recipe, overridden, parse_recipe

from ...errors import TidemillError
from ...tables import with_calibration
from ..batch_answers import BatchAnswers, check_ids

if TYPE_CHECKING:
    from ray.data import Dataset


def checked_keys(file: str | Path | None, given: Mapping[str, Any], ds: Dataset) -> dict[str, Any]:
    """Return the keys of a recipe for a dataset; raises TidemillError for an invalid recipe."""
    try:
        keys = {} if file is None else load_recipe(Path(file).read_text(encoding="utf-8"))
        # A file that a keyword names is not next to the recipe.
        folder = Path() if file is None or "calibration" in given else Path(file).parent
        keys = with_calibration(overridden(keys, given), folder)
        recipe = parse_recipe(keys)
        check_ids(recipe)
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise TidemillError(f"the recipe {file} cannot be read: {reason}") from exc
    except RecipeError as exc:
        named = "" if file is None else f" {file}"
        raise TidemillError(f"the recipe{named} is not valid: {exc}") from exc
    if (schema := _schema_of(ds)) is not None:
        BatchAnswers(keys, schema)
    return keys


def _schema_of(ds: Dataset) -> pa.Schema | None:
    """Return a dataset's columns, or None without rows; pandas columns have no type."""
    found = ds.schema()
    if found is None:
        return None
    pairs = zip(found.names, found.types, strict=True)
    return pa.schema(
        [(name, kind if isinstance(kind, pa.DataType) else pa.null()) for name, kind in pairs]
    )
