"""Table actor: answers batches of a table by a recipe, whichever engine and order they come in."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyarrow import compute, types
from pydantic_core import to_json

from tidemill.batch.table.reader import cells_of
from tidemill.batch.table.recipe import Recipe, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.result_columns import PREFIX, ResultColumns, ResultFacts
from tidemill.protocol.routes import CHAT_COMPLETIONS, EMBEDDINGS

from .engine_actor import EngineActor

_MAX_NUMBER: Final = 2**63 - 1
_NUMBERED = r"^(Line|Row) \d+: "
_LONE_COLUMN = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class TableActor:
    """Ray's callable class for `answer`: an engine, and the recipe's `keys`."""

    def __init__(self, keys: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._recipe = parse_recipe(keys)
        self._engine = EngineActor(options)
        self._num_floats = 0

    async def __call__(self, table: pa.Table) -> AsyncIterator[pa.Table]:
        """Yield the table with the columns of its rows' results."""
        recipe = self._recipe
        template = RequestTemplate(recipe, table.column_names)
        batches = table.to_batches()
        rows = await self._engine.rows(
            line for batch in batches for line in numbered_lines(recipe, template, batch)
        )
        facts = result_facts(recipe, table.schema)
        if recipe.route is EMBEDDINGS:
            facts = replace(facts, num_floats=await self._vector_size(rows))
        yield answered_table(recipe, table, rows, facts)

    async def _vector_size(self, rows: Sequence[bytes]) -> int:
        """Return the length of vectors, also where no row of this batch has one."""
        if not self._num_floats:
            found = ResultFacts.of_rows(rows, self._recipe).num_floats
            self._num_floats = found or await self._probed_size()
        return self._num_floats

    async def _probed_size(self) -> int:
        body = {**self._recipe.body_params, "input": "."}
        line = to_json({"custom_id": "", "url": self._recipe.url, "body": body})
        return ResultFacts.of_rows(await self._engine.rows([(0, line)]), self._recipe).num_floats


def result_facts(recipe: Recipe, schema: pa.Schema) -> ResultFacts:
    """Return what decides the types of columns without a look at rows: no batch knows the others'.

    The length of vectors is the model's.
    """
    if recipe.route is EMBEDDINGS:
        return ResultFacts(has_many_vectors=_has_many_inputs(recipe, schema))
    is_chat = recipe.route is CHAT_COMPLETIONS
    return ResultFacts(
        has_reasoning=is_chat, has_tool_calls=is_chat and bool(recipe.params.get("tools"))
    )


def _has_many_inputs(recipe: Recipe, schema: pa.Schema) -> bool:
    """Say whether a request may have several texts: a list, or a lone column of lists."""
    given = recipe.fields.get("input")
    if isinstance(given, list):
        return len(given) > 1
    lone = _LONE_COLUMN.fullmatch(given) if isinstance(given, str) else None
    if lone is None or lone[1] not in schema.names:
        return False
    kind = schema.field(lone[1]).type
    return bool(types.is_list(kind) or types.is_large_list(kind))


def answered_table(
    recipe: Recipe, table: pa.Table, rows: Sequence[bytes], facts: ResultFacts
) -> pa.Table:
    """Return the kept columns of a table with those of its rows' results."""
    keep = table.column_names if recipe.keep is None else list(recipe.keep)
    columns = ResultColumns(recipe, table.select(keep).schema, facts)
    found, start = [], 0
    for batch in table.to_batches():
        kept = [batch.column(name) for name in keep]
        found.append(columns.batch(kept, rows[start : start + batch.num_rows]))
        start += batch.num_rows
    answered = pa.Table.from_batches(found, columns.schema)
    if recipe.id is not None:
        return answered
    # Its rows have no number: a batch is any part of the table.
    name = f"{PREFIX}error" if "error" in keep else "error"
    place = answered.schema.get_field_index(name)
    bare = compute.replace_substring_regex(answered.column(place), _NUMBERED, "")
    return answered.set_column(place, name, bare)


def numbered_lines(
    recipe: Recipe, template: RequestTemplate, batch: pa.RecordBatch
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a batch with the numbers that key their randomness.

    That is the row's id where this is a whole number, as of a file with such ids; else 0, and the
    line's own bytes, with its id among them, tell it from others.
    """
    cells = {name: cells_of(batch.column(name)) for name in template.columns}
    lines = template.lines(cells, batch.num_rows, 0)
    ids = [None] * batch.num_rows if recipe.id is None else cells[recipe.id]
    for value, line in zip(ids, lines, strict=True):
        is_number = isinstance(value, int) and 0 < value <= _MAX_NUMBER
        yield value if is_number else 0, line
