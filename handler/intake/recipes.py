"""Recipes of uploads that are tables."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from tidemill.batch.model import Batch
from tidemill.batch.object_keys import INPUT_PREFIX, recipe_key
from tidemill.batch.table.detection import detect_table

from ..aws.calls import Operation
from ..deployment import Deployment
from ..lifecycle.batch_lock import Requeue

# Who uploads a folder has the recipe there with the table, or a moment later.
_PATIENCE_SECONDS: Final = 20
_WAIT_SECONDS: Final = 2.0
_BINARY: Final = ("parquet", "arrow")


class TableRecipe(NamedTuple):
    """The keys of a recipe as JSON, and the format of its output."""

    keys: str
    output: str


def find_recipe(
    deployment: Deployment, batch: Batch, head: bytes, now: float
) -> Operation[TableRecipe | None]:
    """Return the recipe of an input that is a table; None for a file of requests, or without one.

    Raises RecipeError, and Requeue where the recipe may be on its way.
    """
    form = detect_table(head)
    if form is None or not batch.source.key.startswith(INPUT_PREFIX):
        return None
    # Late imports: most files are no tables.
    from tidemill.batch.table.drop_recipe import MAX_BYTES, recipe_of_file, recipe_of_metadata
    from tidemill.batch.table.recipe import parse_recipe

    key = recipe_key(batch.source.key)
    if batch.options.recipe:
        keys = recipe_of_metadata(batch.options.recipe)
    elif (yield from deployment.bucket.head(key)) is not None:
        keys = recipe_of_file((yield from deployment.bucket.get_range(key, 0, MAX_BYTES + 1)))
    elif form in _BINARY and now < batch.created_at + _PATIENCE_SECONDS:
        raise Requeue(_WAIT_SECONDS)
    else:
        return None
    recipe = parse_recipe(keys)
    return TableRecipe(json.dumps(keys, ensure_ascii=False), recipe.output or form)
