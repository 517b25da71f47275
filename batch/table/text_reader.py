"""Text tables: CSV, TSV and JSON lines as record batches.

CSV cells are texts; empty ones are null.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from tidemill.protocol.json_bodies import load_json

from ..file.formats import BinaryFile
from ..file.lines import BOM, MAX_LINE_BYTES, RawLine, read_lines
from .detection import delimiter_of
from .errors import TableError, reason_of
from .recipe import TableFormat

_BATCH_ROWS = 1024
_BATCH_BYTES = 2**24
_MAX_JSON_COLUMNS = 10_000
_MAX_NAMED_CHARS = 40

Unpack = Callable[[BinaryFile], BinaryFile]
"""A function that returns a decompressed file from its start."""


class CsvTable:
    """A CSV or TSV file in UTF-8 with a header."""

    def __init__(self, file: BinaryFile, unpack: Unpack, head: bytes) -> None:
        self._file = file
        self._unpack = unpack
        first = head.removeprefix(BOM).split(b"\n", 1)[0]
        self._delimiter = delimiter_of(first.decode("utf-8", "replace"))
        self.format: TableFormat = "tsv" if self._delimiter == "\t" else "csv"
        names = next(self._records(), (1, []))[1]
        if not any(names):
            raise TableError("Line 1 of the CSV must contain the column names.")
        self.schema = pa.schema([pa.field(name, pa.string()) for name in names])

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read all rows; raises TableError for one with more or fewer cells than the header."""
        place_of = {name: place for place, name in enumerate(self.schema.names)}
        places = [place_of[name] for name in columns]
        schema = pa.schema([self.schema.field(place) for place in places])
        for some in self._rows(len(place_of)):
            arrays = [
                pa.array([row[place] or None for row in some], pa.string()) for place in places
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _rows(self, width: int) -> Iterator[list[list[str]]]:
        """Yield the cells of some rows at a time, of bounded size unless one row exceeds it."""
        records = self._records()
        next(records, None)
        some: list[list[str]] = []
        size = 0
        for number, (line, cells) in enumerate(records, 1):
            if len(cells) != width:
                raise TableError(
                    f"Row {number:,} (line {line:,}) of the CSV has {len(cells):,} cells, but its "
                    f"header has {width:,}: quote cells that contain a `{self._delimiter}`, a "
                    "quote or a newline."
                )
            some.append(cells)
            size += self._num_bytes
            if len(some) == _BATCH_ROWS or size > _BATCH_BYTES:
                yield some
                some, size = [], 0
        if some:
            yield some

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the records, including the header, each with its last line.

        A blank line is an empty cell in a table of one column, and no row in other tables.
        """
        csv.field_size_limit(MAX_LINE_BYTES)
        self._num_bytes = self._num_unread = 0
        reader = csv.reader(self._lines(), delimiter=self._delimiter, strict=True)
        started, width = 1, 0
        try:
            for cells in reader:
                self._num_bytes, self._num_unread = self._num_unread, 0
                if cells or width == 1:
                    width = width or len(cells)
                    yield reader.line_num, cells or [""]
                started = reader.line_num + 1
        except csv.Error as exc:
            raise TableError(
                f"The CSV has a stray quote, or a cell that is too long, in the row that starts at "
                f"line {started:,}: {exc}."
            ) from exc

    def _lines(self) -> Iterator[str]:
        stream, number = self._unpack(self._file), 0
        while data := stream.readline(MAX_LINE_BYTES):
            number += 1
            self._num_unread += len(data)
            if self._num_unread > MAX_LINE_BYTES:
                raise TableError(
                    f"The CSV row that ends after line {number:,} is longer than "
                    f"{MAX_LINE_BYTES:,} bytes: a quote may be missing."
                )
            if number == 1:
                data = data.removeprefix(BOM)
            try:
                yield data.decode()
            except UnicodeDecodeError as exc:
                if data.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise TableError("The CSV is UTF-16: save it as UTF-8.") from exc
                raise TableError(
                    f"Line {number:,} of the CSV is not UTF-8: 0x{data[exc.start]:02x} at byte "
                    f"{exc.start + 1:,}; save the file as UTF-8."
                ) from exc


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
            rows.append(_json_row(raw, f"{self._unit} {raw.number:,} of the table"))
            size += len(raw.data)
            if len(rows) == _BATCH_ROWS or size > _BATCH_BYTES:
                yield rows, first
                first += len(rows)
                rows, size = [], 0
        if rows:
            yield rows, first


def _json_row(raw: RawLine, place: str) -> dict[str, Any]:
    """Return the row of a line; raises TableError with its place for an invalid line."""
    if raw.overlong is not None:
        raise TableError(f"{place} is too long: {raw.overlong.num_bytes:,} bytes.")
    try:
        row = load_json(raw.data.removeprefix(BOM), cache_strings="keys")
    except (ValueError, RecursionError) as exc:
        raise TableError(f"{place} is not valid JSON: {reason_of(exc)}.") from exc
    if not isinstance(row, dict):
        raise TableError(f"{place} is not a JSON object: write one object per row.")
    return row


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
