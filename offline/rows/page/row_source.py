"""Row sources: rows of an output for a web page, from any number on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Lock
from typing import Protocol

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.request_text import request_text

from ...console.errors import BadInput
from ...files.line_file import LineFile
from ...files.row_file import RowFile, RowPlace, StoredRow
from ...files.row_index import RowIndex
from ..view import ViewedRow, answer_text

_MAX_SHOWN_BYTES = 2**21
_INVALID = "not a row"


class RowSource(Protocol):
    """Rows that a page shows, readable by several threads; numbers are 1-based."""

    name: str

    def rows(self, first_number: int, custom_id: str | None = None) -> Iterator[ViewedRow | None]:
        """Yield the rows from a number on; None for a row with another custom ID."""

    def row(self, number: int) -> ViewedRow | None:
        """Return one row in full."""

    def count(self) -> int | None:
        """Return the number of rows; None if all rows would have to be read."""


class RequestFile:
    """Requests of rows: the one on the same line, otherwise the first with the custom ID."""

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._index: RowIndex | None = None
        self._lock = Lock()

    def request_of(self, row: ViewedRow) -> bytes | None:
        """Return the line of a row's request, on the row's line or any other."""
        raw = self._line(row.number, row.custom_id)
        if raw is None and row.custom_id is not None:
            for _ in self.build_index():
                pass
            place = self._place_of(row.custom_id)
            raw = None if place is None else self._line(place.number, row.custom_id)
        return None if raw is None else raw.data

    def on_same_line(self, row: ViewedRow) -> str | None:
        """Return the request on the same line as a row, if it has the row's custom ID."""
        return self._text(row.number, row.custom_id)

    def build_index(self) -> Iterator[int]:
        """Index the whole file once; yield the number of read lines, so that callers may stop."""
        with self._lock:
            if self._index is not None:
                return
            index = RowIndex()
            for raw in self._lines.lines(1):
                yield raw.number
                try:
                    custom_id = parse_line(raw).custom_id
                except LineError:
                    continue
                index.add(StoredRow(None, custom_id, None, None), RowPlace(raw.number, 0, 0))
            self._index = index

    def find(self, row: ViewedRow) -> str:
        """Return the request of a row from the index; empty without one."""
        place = None if row.custom_id is None else self._place_of(row.custom_id)
        return "" if place is None else self._text(place.number, row.custom_id) or ""

    def _place_of(self, custom_id: str) -> RowPlace | None:
        if self._index is None:
            return None
        with self._lock:  # the first lookup builds the table
            return self._index.find_id(custom_id)

    def _text(self, number: int, custom_id: str | None) -> str | None:
        raw = self._line(number, custom_id)
        return None if raw is None else request_text(parse_line(raw).body)

    def _line(self, number: int, custom_id: str | None) -> RawLine | None:
        """Return a line if it is a request with this custom ID."""
        raw = self._lines.line(number)
        if raw is None or custom_id is None:
            return None
        try:
            return raw if parse_line(raw).custom_id == custom_id else None
        except LineError:
            return None


class RowLines:
    """Rows of JSONL in either dialect; a line that is not a row is shown as a failed row."""

    def __init__(self, rows: RowFile) -> None:
        self._rows = rows
        self._lines = rows.lines
        self.name = rows.name

    def rows(self, first_number: int, custom_id: str | None = None) -> Iterator[ViewedRow | None]:
        """Yield the rows; most rows with another custom ID are not parsed."""
        may_hold = _id_filter(custom_id)
        for raw in self._lines.lines(first_number):
            row = self._row(raw) if may_hold(raw.data) else None
            yield row if row and custom_id in {None, row.custom_id} else None

    def row(self, number: int) -> ViewedRow | None:
        """Return one row in full; a line that is not a row has its beginning as text."""
        raw = self._lines.line(number)
        if raw is None:
            return None
        row = self._row(raw)
        if row.words == _INVALID:
            return replace(row, json=raw.data[:_MAX_SHOWN_BYTES].decode(errors="replace"))
        return replace(row, data=raw.data)

    def count(self) -> int:
        """Return the number of lines."""
        return self._lines.count()

    def _row(self, raw: RawLine) -> ViewedRow:
        if raw.overlong is not None:
            words = f"the row has {raw.overlong.num_bytes:,} bytes, which is too long to show"
            return ViewedRow(raw.number, None, _INVALID, words, is_failed=True)
        try:
            row = self._rows.parse(raw.number, raw.data)
            words, text, reasons = answer_text(row)
        except (BadInput, ValueError, RecursionError) as exc:  # a number of 5,000 digits
            return ViewedRow(raw.number, None, _INVALID, str(exc), is_failed=True)
        is_failed = row.body is None
        return ViewedRow(raw.number, row.custom_id, words, text, is_failed, reasons)


def _id_filter(custom_id: str | None) -> Callable[[bytes], bool]:
    """Return a test that all lines with a custom ID pass, and few others."""
    if custom_id is None:
        return lambda _: True
    plain = json.dumps(custom_id, ensure_ascii=False).encode(errors="surrogatepass")
    escaped = json.dumps(custom_id).encode()
    # Other programs write `\/`, or `\u00e9` in another case.
    return lambda data: plain in data or escaped in data or b"\\u" in data or b"\\/" in data
