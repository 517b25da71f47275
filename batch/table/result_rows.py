"""Result rows of a batch, in the order of the table's rows, and as rows of its output."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pydantic_core import from_json

from ..file.lines import LineError, RawLine, parse_line
from ..file.rows import print_malformed, print_not_run
from .recipe import Recipe
from .result_columns import ResultColumns, ResultFacts

_NOT_RUN: Final = "This row did not run before the end of its batch."
_MAX_BATCH_BYTES: Final = 2**24
_ID_AT_START: Final = re.compile(rb'\{(?:"id":"[^"\\]*",)?"custom_id":"([^"\\]+)",')


def in_order(lines: Iterable[RawLine], files: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the row of each line; a line that did not run gets an error row.

    Each file has its rows in line order.
    """
    readers = [_RowReader(file) for file in files]
    for raw in lines:
        custom_id = _id_at_start(raw.data) or _id_of_line(raw)
        reader = next((one for one in readers if one.is_of(custom_id)), None)
        yield _not_run(raw) if reader is None else reader.pop()


def _id_at_start(data: bytes) -> str | None:
    """Return the custom ID from its usual position in lines and rows; None if it is elsewhere."""
    match = _ID_AT_START.match(data)
    return match[1].decode() if match else None


def _id_of_line(raw: RawLine) -> str | None:
    try:
        return parse_line(raw).custom_id
    except LineError as exc:
        return exc.custom_id


def _not_run(raw: RawLine) -> bytes:
    try:
        custom_id = parse_line(raw).custom_id
    except LineError as exc:
        return print_malformed(raw.digest, exc)
    return print_not_run(raw.digest, custom_id, code="batch_not_run", message=_NOT_RUN)


class _RowReader:
    """Reads rows with a look-ahead of one row."""

    def __init__(self, file: Iterable[bytes]) -> None:
        self._file = iter(file)
        self._data = b""
        self._custom_id: Any = None
        self.pop()

    def is_of(self, custom_id: str | None) -> bool:
        """Say whether the next row belongs to a line."""
        return bool(self._data) and self._custom_id == custom_id

    def pop(self) -> bytes:
        """Return the next row and advance."""
        data, self._data = self._data, next(self._file, b"")
        # Another server's rows may begin differently.
        if self._data:
            self._custom_id = _id_at_start(self._data) or from_json(self._data).get("custom_id")
        return data


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
