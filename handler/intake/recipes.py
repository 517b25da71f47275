"""Recipes of uploads that are tables."""

from __future__ import annotations

from typing import Final, NamedTuple

from tidemill.batch.model import Batch
from tidemill.batch.object_keys import INPUT_PREFIX
from tidemill.batch.table.detection import detect_table
from tidemill.batch.table.drop_recipe import MAX_BYTES, drop_recipe, has_recipe, recipe_key
from tidemill.batch.table.recipe import TableFormat

from ..aws.calls import Operation
from ..deployment import Deployment
from ..lifecycle.batch_lock import Requeue

# Who uploads a folder has the recipe there with the table, or a moment later.
_PATIENCE_SECONDS: Final = 20
_WAIT_SECONDS: Final = 2.0
_BINARY: Final = ("parquet", "arrow")


class TableRecipe(NamedTuple):
    """Format of a table, and the keys of its recipe as JSON."""

    format: TableFormat
    keys: str


def find_recipe(
    deployment: Deployment, batch: Batch, head: bytes, now: float
) -> Operation[TableRecipe | None]:
    """Return the recipe of an input that is a table; None for a file of requests, or without one.

    Raises RecipeError, and Requeue where the recipe may be on its way.
    """
    form = detect_table(head)
    metadata = batch.options.metadata
    if form is None or not batch.source.key.startswith(INPUT_PREFIX):
        return None
    key, beside = recipe_key(batch.source.key), None
    found = yield from deployment.bucket.head(key)
    if found is not None:
        beside = yield from deployment.bucket.get_range(key, 0, MAX_BYTES + 1)
    if beside is None and not has_recipe(metadata):
        if form in _BINARY and now < batch.created_at + _PATIENCE_SECONDS:
            raise Requeue(_WAIT_SECONDS)
        return None
    return TableRecipe(form, drop_recipe(beside, metadata))
