"""Result rows of a batch, in the order of the table's rows, and as rows of its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import pyarrow as pa

from ..file.lines import LineError, RawLine, parse_line
from ..file.row_order import rows_of_lines
from ..file.rows import print_malformed, print_not_run
from .recipe import Recipe
from .result_columns import ResultColumns, ResultFacts

_NOT_RUN: Final = "This row did not run before the end of its batch."
_MAX_BATCH_BYTES: Final = 2**24


def in_order(lines: Iterable[RawLine], files: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the row of each line; a line that did not run gets an error row.

    Each file has its rows in line order.
    """
    for raw, row in rows_of_lines(lines, [files], are_requests=True):
        yield _not_run(raw) if row is None else row


def _not_run(raw: RawLine) -> bytes:
    try:
        custom_id = parse_line(raw).custom_id
    except LineError as exc:
        return print_malformed(raw.digest, exc)
    return print_not_run(raw.digest, custom_id, code="batch_not_run", message=_NOT_RUN)


def finished_columns(
    recipe: Recipe,
    kept: pa.Schema,
    facts: ResultFacts,
    read: Callable[[ResultColumns], Iterable[pa.RecordBatch]],
) -> ResultColumns:
    """Return the columns of a table; a recipe that calibrates reads all rows once more for it.

    `read` returns the output of some columns, from the first row on.
    """
    columns = ResultColumns(recipe, kept, facts)
    if recipe.calibration is None:
        return columns
    from .table_calibration import fit_calibration  # late: few recipes have one

    calibration = fit_calibration(recipe.calibration, recipe.questions, read(columns))
    return ResultColumns(recipe, kept, facts, calibration)


def output_batches(
    columns: ResultColumns, kept: Iterable[pa.RecordBatch], rows: Iterator[bytes]
) -> Iterator[pa.RecordBatch]:
    """Yield the output of a table: retained columns as read, next to each row's results."""
    for batch in kept:
        start = 0
        while start < batch.num_rows:
            some = _next_rows(rows, batch.num_rows - start)
            cells = batch.slice(start, len(some))
            yield columns.batch([cells.column(name) for name in columns.kept], some)
            start += len(some)


def _next_rows(rows: Iterator[bytes], limit: int) -> list[bytes]:
    """Return the next rows, of bounded size."""
    chunk, size = [], 0
    for row in islice(rows, limit):
        chunk.append(row)
        if (size := size + len(row)) >= _MAX_BATCH_BYTES:
            break
    assert chunk, "the rows are fewer than those of the table"
    return chunk
