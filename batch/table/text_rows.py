"""Rows of text tables, without Arrow: records of a CSV, and objects of JSON lines."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import Any

from tidemill.protocol.json_bodies import load_json

from ..file.formats import BinaryFile
from ..file.lines import BOM, MAX_LINE_BYTES, RawLine
from .detection import delimiter_of
from .errors import TableError, reason_of
from .recipe import TableFormat

Unpack = Callable[[BinaryFile], BinaryFile]
"""A function that returns a decompressed file from its start."""


class CsvRows:
    """Rows of a CSV or TSV file in UTF-8 with a header; raises TableError.

    `num_bytes` is the size of the row that was read last.
    """

    def __init__(self, file: BinaryFile, unpack: Unpack, head: bytes) -> None:
        self._file = file
        self._unpack = unpack
        first = head.removeprefix(BOM).split(b"\n", 1)[0]
        self._delimiter = delimiter_of(first.decode("utf-8", "replace"))
        self.format: TableFormat = "tsv" if self._delimiter == "\t" else "csv"
        self.num_bytes = 0
        self.names = next(self._records(), (1, []))[1]
        if not any(self.names):
            raise TableError("Line 1 of the CSV must contain the column names.")

    def rows(self) -> Iterator[list[str]]:
        """Yield the cells of each row; raises TableError for one with more or fewer than names."""
        records = self._records()
        next(records, None)
        width = len(self.names)
        for number, (line, cells) in enumerate(records, 1):
            if len(cells) != width:
                raise TableError(
                    f"Row {number:,} (line {line:,}) of the CSV has {len(cells):,} cells, but its "
                    f"header has {width:,}: quote cells that contain a `{self._delimiter}`, a "
                    "quote or a newline."
                )
            yield cells

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the records, including the header, each with its last line.

        A blank line is an empty cell in a table of one column, and no row in other tables.
        """
        csv.field_size_limit(MAX_LINE_BYTES)
        self.num_bytes = self._num_unread = 0
        reader = csv.reader(self._lines(), delimiter=self._delimiter, strict=True)
        started, width = 1, 0
        try:
            for cells in reader:
                self.num_bytes, self._num_unread = self._num_unread, 0
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


def json_row(raw: RawLine, place: str) -> dict[str, Any]:
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
