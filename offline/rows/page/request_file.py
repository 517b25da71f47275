"""Requests of rows: lines of another file, found by custom ID."""

from __future__ import annotations

from threading import Lock

from tidemill.batch.file.lines import LineError, RawLine, parse_line

from ...files.line_file import LineFile
from ...files.row_file import RowPlace, StoredRow
from ...files.row_index import RowIndex


class RequestFile:
    """Requests of rows: the one on the same line, otherwise the first with the custom ID."""

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._index: RowIndex | None = None
        self._lock = Lock()

    def request_of(self, number: int, custom_id: str) -> bytes | None:
        """Return the request of a row; the first one on another line indexes the whole file."""
        raw = self._line(number, custom_id)
        if raw is None:
            with self._lock:  # the first lookup builds the table
                place = self._indexed().find_id(custom_id)
            raw = None if place is None else self._line(place.number, custom_id)
        return None if raw is None else raw.data

    def _indexed(self) -> RowIndex:
        if self._index is None:
            index = RowIndex()
            for raw in self._lines.lines(1):
                try:
                    found = parse_line(raw).custom_id
                except LineError:
                    continue
                index.add(StoredRow(None, found, None, None), RowPlace(raw.number, 0, 0))
            self._index = index
        return self._index

    def _line(self, number: int, custom_id: str) -> RawLine | None:
        """Return a line if it is a request with this custom ID."""
        raw = self._lines.line(number)
        try:
            return raw if raw is not None and parse_line(raw).custom_id == custom_id else None
        except LineError:
            return None
