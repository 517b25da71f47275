"""Lines of a table: its rows rendered as requests by its recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from tidemill.batch.model import Source
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import ParquetTable, Table, open_table, read_rows, rendered
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.table_check import checked_template

from ..aws.objects.object_file import open_object
from ..aws.sync import Aws

MAX_ROWS = 50_000_000
"""Maximum rows of a table: as many as can be rendered in runs of a quarter of an hour."""

_NUM_LINES = 128


def table_lines(aws: Aws, source: Source, recipe_keys: str) -> Iterator[bytes]:
    """Yield the lines of all rows, a few at a time with an empty piece after each group.

    Raises TableError and RecipeError, the latter before any line.
    """
    recipe = parse_recipe(json.loads(recipe_keys), may_escalate=True)
    with open_object(aws, source) as file:
        table = open_table(file)
        _check_rows(table)
        form = recipe.output or table.format
        template = checked_template(recipe, table.schema, form, table.batches)
        for _, lines in rendered(template, read_rows(table, template.columns)):
            while some := b"".join(islice(lines, _NUM_LINES)):
                yield some
                yield b""


def _check_rows(table: Table) -> None:
    """Raise TableError for more rows than can be rendered, by the footer's count."""
    if isinstance(table, ParquetTable) and table.num_rows > MAX_ROWS:
        raise TableError(
            f"The table has {table.num_rows:,} rows, more than {MAX_ROWS:,}: split it into several."
        )
