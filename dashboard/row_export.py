"""Rows that match a search as one CSV or Parquet file, which the page joins of pieces.

A piece is a line of JSON and then bytes of the file. No process holds the file, and no request
takes long: each reads a few MiB of rows, after those of the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol

from pydantic_core import to_json

from tidemill.batch.table.csv_text import csv_text
from tidemill.batch.table.parquet_writer import (
    MAGIC,
    CellType,
    RowGroup,
    utf8,
    write_footer,
    write_group,
)

from .exported_cells import ExportShape, first_answers
from .row_query import BadQuery, RowQuery
from .rows_page import SEARCHED_BYTES, StoredRows

PIECE_TYPE: Final = "application/octet-stream"
_PIECE_BYTES: Final = 3 * 2**20
"""Bytes of a piece, which Lambda returns as base64 in at most 6 MB."""

_PIECE_ROWS: Final = 20_000
_MAX_NUMBER: Final = 2**53
_BOM: Final = "\ufeff"
_FORMULA: Final = re.compile(r"[=+\-@\t\r]")
_NUMBER: Final = re.compile(r"[+-]?[\d.,]+(?:[eE][+-]?\d+)?%?")
_CELL_CHARS: Final = 4
"""Quotes, an apostrophe and a comma."""

_NUMBER_CHARS: Final = 25
_FLOAT_CHARS: Final = 16
_NUM_COUNTS: Final = 3
_INVALID: Final = "Invalid parameters of a download: reload the page."


class ExportSource(Protocol):
    """Rows to export."""

    def find(self, query: RowQuery, limit: int, max_bytes: int) -> StoredRows:
        """Return the first rows that match, about `max_bytes` of them; raises RowsUnavailable."""


class _Request(NamedTuple):
    """Parameters of a piece: the search, the columns if they are known, and the place in the file.

    `end` has the numbers of rows, row groups and bytes of their descriptions.
    """

    query: RowQuery
    is_parquet: bool
    shape: ExportShape | None
    start: int
    end: Sequence[int]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> _Request:
        form, columns = fields.get("format", ""), fields.get("columns", "")
        if form not in {"csv", "parquet"}:
            raise BadQuery(f"Unknown format {form[:20]!r}: choose csv or parquet.")
        try:
            shape = ExportShape.from_text(columns) if columns else None
            end = [_number(text) for text in filter(None, fields.get("end", "").split(","))]
            start = _number(fields.get("start", "0"))
        except (RecursionError, ValueError) as exc:
            raise BadQuery(_INVALID) from exc
        if end and (len(end) != _NUM_COUNTS or shape is None):
            raise BadQuery(_INVALID)
        return cls(RowQuery.of(fields), form == "parquet", shape, start, end)


def export_piece(source: ExportSource, fields: Mapping[str, str]) -> bytes:
    """Return the next piece; raises BadQuery, and RowsUnavailable.

    Its JSON has the number of `rows`, the line `after` which the next piece begins, null at the
    end, the `columns` to ask for, and how many of the last bytes describe a row group.
    """
    request = _Request.of(fields)
    if request.end and request.shape:
        try:
            begin, end = write_footer(request.shape.columns(), *request.end)
        except OverflowError as exc:
            raise BadQuery(_INVALID) from exc
        return _piece(begin + end, rows=0, after=None, about=len(end))
    query = request.query
    max_bytes = SEARCHED_BYTES if query.reads_rows else _PIECE_BYTES
    found = source.find(query, _PIECE_ROWS, max_bytes)
    shape = request.shape
    if shape is None and found.rows:
        shape = _shape(source, query, found)
    if shape is None or not found.rows:
        columns = "" if shape is None else shape.to_text()
        return _piece(b"", rows=0, after=found.next_after, columns=columns)
    rows = [*_fitting(shape, found.rows)]
    after = rows[-1][0] if len(rows) < len(found.rows) else found.next_after
    meta: dict[str, Any] = {"rows": len(rows), "after": after, "columns": shape.to_text()}
    data, group = encode_rows(shape, rows, is_parquet=request.is_parquet, start=request.start)
    return _piece(data + group, **meta, about=len(group))


def _shape(source: ExportSource, query: RowQuery, found: StoredRows) -> ExportShape:
    """Return the columns for the first rows with an answer, which failed ones may precede."""
    answers, is_enough = first_answers(data for _, data in found.rows)
    if not (is_enough or query.status) and found.next_after is not None:
        behind = source.find(replace(query, status="ok"), _PIECE_ROWS, SEARCHED_BYTES)
        answers, _ = first_answers(data for _, data in behind.rows)
    return ExportShape.of_answers(answers)


def encode_rows(
    shape: ExportShape,
    rows: Sequence[Sequence[Any]],
    *,
    is_parquet: bool,
    start: int,
    escapes: bool = True,
) -> RowGroup:
    """Return the cells of rows for the place `start` of a file; a file has at least one row.

    With `escapes`, CSV has an apostrophe before each cell that a spreadsheet would run.
    """
    if not is_parquet:
        return RowGroup(_csv(shape, rows, has_header=not start, escapes=escapes), b"")
    head = b"" if start else MAGIC
    group = write_group(shape.columns(), [*zip(*rows, strict=True)], start + len(head))
    return RowGroup(head + group.data, group.about)


def _piece(data: bytes, **meta: Any) -> bytes:
    return to_json(meta) + b"\n" + data


def _fitting(shape: ExportShape, rows: Sequence[tuple[int, bytes | None]]) -> Iterator[list[Any]]:
    """Yield the cells of as many rows as a piece has room for, at least one."""
    room, kinds = _PIECE_BYTES, [column.type for column in shape.columns()]
    for line, data in rows:
        cells = shape.cells(line, data)
        size = sum(map(_size, cells, kinds))
        if size > _PIECE_BYTES:
            cells = shape.without_answer(cells)
            size = sum(map(_size, cells, kinds))
        if size > _PIECE_BYTES:
            cells, size = shape.cells(line, None), 0
        room -= size
        if room < 0:
            return
        yield cells


def _size(cell: Any, kind: CellType) -> int:
    """Return the bytes of a cell at most, in CSV or Parquet."""
    if cell is None:
        return _CELL_CHARS
    size: int = _NUMBER_CHARS
    if kind == "text":
        size = len(utf8(cell)) + cell.count('"') + 2 * cell.count("\0")
    elif kind in {"floats", "doubles"}:
        size = len(cell) * (_FLOAT_CHARS if kind == "floats" else _NUMBER_CHARS)
    return size + _CELL_CHARS


def _csv(
    shape: ExportShape, rows: Sequence[Sequence[Any]], *, has_header: bool, escapes: bool
) -> bytes:
    columns = shape.columns()
    table = (
        [[_csv_cell(column.name, "text", escapes=escapes) for column in columns]]
        if has_header
        else []
    )
    table += [
        [
            _csv_cell(cell, column.type, escapes=escapes)
            for cell, column in zip(cells, columns, strict=True)
        ]
        for cells in rows
    ]
    return utf8((_BOM if has_header else "") + csv_text(table))


def _csv_cell(cell: Any, kind: CellType, *, escapes: bool) -> Any:
    """Return a cell for CSV; an apostrophe keeps a spreadsheet from running it as a formula."""
    if cell is not None and kind == "text":
        is_formula = escapes and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
        return ("'" if is_formula else "") + cell.replace("\0", "\ufffd")
    if cell is None or kind in {"whole", "number"}:
        return cell
    form = "{:.9g}" if kind == "floats" else "{!r}"
    return f"[{','.join(map(form.format, cell))}]"


def _number(text: str) -> int:
    found = int(text)
    if not 0 <= found <= _MAX_NUMBER:
        raise ValueError(text)
    return found
