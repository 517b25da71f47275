"""Batch answers: answers to record batches of one schema, in columns that are declared first."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import pyarrow as pa
from pyarrow import compute

from tidemill.batch.table.cells import cells_of
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import Recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.table_check import check_cells
from tidemill.engine_process.frames import Row
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    MODERATIONS,
    POOLING,
    RESPONSES,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

from ..errors import TidemillError
from ..in_flight import Sent, answers_to
from ..tables import compile_recipe, with_calibration

_BATCH_ROWS = 1024
_STRATEGY: Final = "aggregation_strategy"
_SAMPLED: Final = (CHAT_COMPLETIONS, COMPLETIONS, TRANSCRIPTIONS, TRANSLATIONS)
_MAX_NUMBER: Final = 2**63
_LONE_COLUMN: Final = re.compile(r"\{\{-?\s*(\w+)\s*-?\}\}")
# A row of a distributed table has no number.
_ROW_NUMBER: Final = r"^Row \d+: "


class LineSender(Protocol):
    """An engine that accepts lines; its futures get a row, or raise EngineDied."""

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Send a line; `number` and the bytes determine its random numbers if it has no seed."""

    def max_inflight(self) -> int:
        """Wait for the model, and return the number of requests that keeps the engine busy."""


class BatchAnswers:
    """Answers to tables of one schema, by a recipe; raises TidemillError for an invalid recipe.

    Requests are rendered from `columns`; the output consists of the columns `keep` and the answers'
    `fields`. A row's answer does not depend on where it is computed: the `id` column determines the
    random numbers of sampled requests.
    """

    def __init__(self, recipe: Mapping[str, Any], schema: pa.Schema) -> None:
        self._given = (with_calibration(recipe), schema)
        self._checked: pa.Schema | None = None
        self._recipe, self._template, self.keep = compile_recipe(self._given[0], schema)
        try:
            check_ids(self._recipe)
        except RecipeError as exc:
            raise TidemillError(f"the recipe is not valid: {exc}") from exc
        self.columns: tuple[str, ...] = self._template.columns
        # `run` derives these facts from all rows; here they are declared before the first row.
        self._facts = ResultFacts(
            has_reasoning=self._recipe.route in {CHAT_COMPLETIONS, RESPONSES},
            has_tool_calls="tools" in self._recipe.params,
            has_spans=self._recipe.wants_spans,
            has_many=self._recipe.route in {EMBEDDINGS, CLASSIFY, MODERATIONS, POOLING}
            and self._has_lists(schema),
        )
        kept = pa.schema([schema.field(name) for name in self.keep])
        declared = ResultColumns(self._recipe, kept, self._facts).schema
        self.fields: list[pa.Field] = list(declared)[len(self.keep) :]

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchAnswers, self._given

    def answered(
        self, engine: LineSender, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the kept columns of batches with the answers; raises EngineDied."""
        waiting: deque[pa.RecordBatch] = deque()
        rows: list[bytes] = []
        sent = (
            engine.send_line(number, line)
            for batch, lines in self._rendered(batches, waiting)
            for number, line in lines
        )
        for _, row in answers_to(sent, engine.max_inflight(), in_order=True):
            assert isinstance(row, Row)
            rows.append(row.row)
            if len(rows) == waiting[0].num_rows:
                batch = waiting.popleft()
                kept = [batch.column(name) for name in self.keep]
                names = [*self.keep, *(field.name for field in self.fields)]
                yield pa.RecordBatch.from_arrays([*kept, *self._arrays(rows)], names)
                rows = []
        if waiting or rows:
            raise TidemillError("the engine returned fewer rows than the table has")

    async def answer_columns(self, engine: LineSender, batch: pa.RecordBatch) -> pa.StructArray:
        """Return the answers to the rows of a batch of `columns`; raises EngineDied."""
        lines = list(self._lines(batch, 1))
        if len(lines) != batch.num_rows:
            raise TidemillError(f"{batch.num_rows} rows were rendered into {len(lines)} requests")
        sent = [engine.send_line(number, line).future for number, line in lines]
        try:
            rows = await asyncio.gather(*map(asyncio.wrap_future, sent))
        finally:
            for future in sent:
                future.cancel()
        return pa.StructArray.from_arrays(
            self._arrays([row.row for row in rows]), fields=self.fields
        )

    def _rendered(
        self, batches: Iterable[pa.RecordBatch], waiting: deque[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, Iterator[tuple[int, bytes]]]]:
        first_number = 1
        for whole in batches:
            for start in range(0, whole.num_rows, _BATCH_ROWS):
                batch = whole.slice(start, _BATCH_ROWS)
                waiting.append(batch)
                yield batch, self._lines(batch, first_number)
                first_number += batch.num_rows

    def _lines(self, batch: pa.RecordBatch, first_number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the line of each row with the number that is part of its seed.

        With an `id` column, the number is the ID if that is a whole number, so that tables numbered
        from 1 get the seeds of `tidemill run`; otherwise it is 0, and the line contains the ID.
        """
        self._check_types(batch)
        cells = {name: cells_of(batch.column(name)) for name in self.columns}
        lines = self._template.lines(cells, batch.num_rows, first_number)
        numbers: Iterable[int] = range(first_number, first_number + batch.num_rows)
        if self._recipe.id is not None:
            numbers = map(_number_of, cells[self._recipe.id])
        for number, line in zip(numbers, lines, strict=True):
            yield number, line.removesuffix(b"\n")

    def _check_types(self, batch: pa.RecordBatch) -> None:
        """Raise TidemillError for a type that is known only from rows, as with Spark."""
        if self._checked is not None and self._checked.equals(batch.schema):
            return
        try:
            check_cells(self._template, batch.schema)
        except RecipeError as exc:
            raise TidemillError(f"the recipe is not valid: {exc}") from exc
        self._checked = batch.schema

    def _arrays(self, rows: Sequence[bytes]) -> list[pa.Array]:
        """Return the columns of the answers, in their declared types."""
        facts = self._facts
        is_undeclared = self._recipe.route is CLASSIFY and not facts.has_spans
        if is_undeclared and ResultFacts.of_rows(rows, self._recipe).has_spans:
            raise TidemillError(
                f'this model labels spans of texts: set params={{"{_STRATEGY}": "simple"}}, which '
                "declares their column"
            )
        if self._recipe.route is EMBEDDINGS:
            found = ResultFacts.of_rows(rows, self._recipe)
            facts = replace(found, has_many=facts.has_many)
        plan = self._recipe.calibration
        saved = None if plan is None else plan.saved
        batch = ResultColumns(self._recipe, pa.schema([]), facts, saved).batch([], rows)
        arrays: list[pa.Array] = []
        for name, column, field in zip(batch.schema.names, batch.columns, self.fields, strict=True):
            array = column.cast(field.type)
            if name == "error":
                array = compute.replace_substring_regex(array, _ROW_NUMBER, "")
            arrays.append(array)
        return arrays

    def _has_lists(self, schema: pa.Schema) -> bool:
        """Return whether a request's input is a list of texts, each of which gets an answer."""
        given = self._recipe.fields.get("input", self._recipe.params.get("input"))
        if not isinstance(given, str):
            return isinstance(given, list)
        column = _LONE_COLUMN.fullmatch(given)
        return column is not None and _is_list(schema.field(column[1]).type)


def check_ids(recipe: Recipe) -> None:
    """Raise RecipeError for a calibration to fit, and for sampled requests of rows without an ID.

    Rows at the same position of two partitions would draw the same samples.
    """
    plan = recipe.calibration
    if plan is not None and (plan.saved is None or plan.gold):
        raise RecipeError(
            "`calibrate` and `gold` need all rows of a table at once: use a saved `calibration`, "
            "or calibrate the written table with `tidemill calibrate`"
        )
    is_fixed = recipe.params.get("temperature") == 0 or recipe.params.get("seed") is not None
    if recipe.id is None and recipe.route in _SAMPLED and not is_fixed:
        raise RecipeError(
            "sampled requests need an ID per row, because rows of a dataset have no number: set id "
            'to a column of unique values, such as "review_id", or set params={"temperature": 0} '
            'or params={"seed": 1}'
        )


def _number_of(value: Any) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER
    return value if is_number else 0


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
