"""Text tables: CSV, TSV and JSON lines as record batches.

CSV cells are texts; empty ones are null.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from ..file.formats import BinaryFile
from ..file.lines import read_lines
from .errors import TableError
from .recipe import TableFormat
from .text_rows import CsvRows, Unpack, json_row

_BATCH_ROWS = 1024
_BATCH_BYTES = 2**24
_MAX_JSON_COLUMNS = 10_000
_MAX_NAMED_CHARS = 40


class CsvTable:
    """A CSV or TSV file in UTF-8 with a header."""

    def __init__(self, file: BinaryFile, unpack: Unpack, head: bytes) -> None:
        self._csv = CsvRows(file, unpack, head)
        self.format: TableFormat = self._csv.format
        self.schema = pa.schema([pa.field(name, pa.string()) for name in self._csv.names])

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read all rows; raises TableError for one with more or fewer cells than the header."""
        place_of = {name: place for place, name in enumerate(self.schema.names)}
        places = [place_of[name] for name in columns]
        schema = pa.schema([self.schema.field(place) for place in places])
        for some in self._rows():
            arrays = [
                pa.array([row[place] or None for row in some], pa.string()) for place in places
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _rows(self) -> Iterator[list[list[str]]]:
        """Yield the cells of some rows at a time, of bounded size unless one row exceeds it."""
        some: list[list[str]] = []
        size = 0
        for cells in self._csv.rows():
            some.append(cells)
            size += self._csv.num_bytes
            if len(some) == _BATCH_ROWS or size > _BATCH_BYTES:
                yield some
                some, size = [], 0
        if some:
            yield some


class JsonTable:
    """JSON objects, each a `unit` of a file; column types are inferred from all of them."""

    format: TableFormat = "jsonl"

    def __init__(self, file: BinaryFile, unpack: Unpack, *, unit: str = "line") -> None:
        self._file = file
        self._unpack = unpack
        self._unit = unit.capitalize()
        self._names: dict[str, None] = {}
        self.schema = pa.schema([])
        for rows, first in self._rows():
            for row in rows:
                self._names |= dict.fromkeys(row)
            if len(self._names) > _MAX_JSON_COLUMNS:
                raise TableError(
                    f"The rows of the table have more than {_MAX_JSON_COLUMNS:,} different keys: "
                    "put the keys that vary into an object in one column."
                )
            fields = [pa.field(name, _array(rows, name, first).type) for name in self._names]
            self.schema = _unified(self.schema, pa.schema(fields), first)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read all rows; missing values are null."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        for rows, first in self._rows():
            arrays = [_array(rows, field.name, first, field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _rows(self) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Yield some rows at a time, and the number of the first of them."""
        first, size = 1, 0
        rows: list[dict[str, Any]] = []
        for raw in read_lines(self._unpack(self._file)):
            rows.append(json_row(raw, f"{self._unit} {raw.number:,} of the table"))
            size += len(raw.data)
            if len(rows) == _BATCH_ROWS or size > _BATCH_BYTES:
                yield rows, first
                first += len(rows)
                rows, size = [], 0
        if rows:
            yield rows, first


def _array(
    rows: Sequence[dict[str, Any]], name: str, first: int, kind: pa.DataType | None = None
) -> pa.Array:
    """Return a column of some rows; raises TableError for a cell of another type."""
    cells = [row.get(name) for row in rows]
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass
    for place, cell in enumerate(cells):
        try:
            pa.array(cells[: place + 1], kind)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
            shown = repr(cell)[:_MAX_NAMED_CHARS]
            raise TableError(
                f"Row {first + place:,} of the table has {shown} in column `{name}`, which differs "
                "in type from the rows before it, or is too large for one."
            ) from exc
    raise AssertionError


def _unified(schema: pa.Schema, other: pa.Schema, first: int) -> pa.Schema:
    try:
        return pa.unify_schemas([schema, other], promote_options="permissive")
    except pa.ArrowException as exc:
        reason = str(exc).split("\n", 1)[0].rstrip(".")
        raise TableError(
            f"Columns of the table change their type at row {first:,} or after it: {reason}."
        ) from exc
