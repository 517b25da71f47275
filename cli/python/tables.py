"""Tables of Python programs: rows asked of an engine, results returned as columns beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa

from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.reader import cells_of
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.result_columns import ALL_COLUMNS, ResultColumns, ResultFacts

from .engine_process import AnsweredRow, EngineProcess
from .errors import RequestFailed, TidemillError
from .in_flight import InFlight

_BATCH_ROWS = 1024


def answer_table(process: EngineProcess, table: Any, recipe: Mapping[str, Any]) -> pa.Table:
    """Return a table with columns of results; see `Engine.answer_table`."""
    given = table if isinstance(table, pa.Table) else pa.table(table)
    try:
        asked = parse_recipe(recipe)
        template = RequestTemplate(asked, given.column_names)
        keep = given.column_names if asked.keep is None else list(asked.keep)
        ResultColumns(asked, given.select(keep).schema, ALL_COLUMNS)
    except RecipeError as exc:
        raise TidemillError(f"the recipe cannot work: {exc}") from exc
    rows = list(_rows(process, _lines(given, template)))
    kept = given.select(keep)
    columns = ResultColumns(asked, kept.schema, ResultFacts.of_rows(rows, asked))
    batches, start = [], 0
    for batch in kept.to_batches(max_chunksize=_BATCH_ROWS):
        batches.append(columns.batch(batch.columns, rows[start : start + batch.num_rows]))
        start += batch.num_rows
    return pa.Table.from_batches(batches, columns.schema)


def _rows(process: EngineProcess, lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the row of each line; raises EngineDied."""
    answered = threading.Event()
    running = InFlight[AnsweredRow](answered.set, in_order=True)
    numbered, limit = enumerate(lines, 1), process.max_inflight()
    try:
        while True:
            answered.clear()
            for number, line in islice(numbered, limit - len(running)):
                running.add(process.send_line(number, line.removesuffix(b"\n")))
            if not running:
                return
            for _, row in running.take():
                if isinstance(row, RequestFailed):
                    raise row
                yield row.data
            if running:
                answered.wait()
    finally:
        running.cancel()


def _lines(table: pa.Table, template: RequestTemplate) -> Iterator[bytes]:
    number = 1
    for batch in table.select(list(template.columns)).to_batches(max_chunksize=_BATCH_ROWS):
        cells = {name: cells_of(batch.column(name)) for name in template.columns}
        yield from template.lines(cells, batch.num_rows, number)
        number += batch.num_rows
