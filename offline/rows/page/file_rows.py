"""Rows of JSONL for the page, in either dialect; a line that is not a row has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.dashboard.row_facts import facts_of
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import (
    FoundRows,
    Requests,
    SearchedRow,
    StoredRows,
    select_rows,
    views_of,
)

from ...files.line_file import LineFile
from .request_file import RequestFile

SEARCHED_BYTES: Final = 2**27
"""Bytes that one search reads at most: about a second."""

_NO_FILE: Final = "Requests are shown with `tidemill view ROWS -i REQUESTS --browser`."
_NO_REQUEST: Final = "No request has this custom ID."


class FileRows:
    """The rows of a file, next to those of another file of requests."""

    def __init__(self, lines: LineFile, requests: RequestFile | None) -> None:
        self._lines = lines
        self._requests = requests

    @property
    def num_rows(self) -> int:
        """Return the number of lines."""
        return self._lines.count()

    def find(self, query: RowQuery, limit: int, max_bytes: int) -> StoredRows:
        """Return the rows that match, as they are stored."""
        rows = (
            SearchedRow(raw.number, None if raw.overlong else raw.data)
            for raw in self._lines.lines(max(1, query.begin))
        )
        return select_rows(rows, query, limit, max_bytes=max_bytes)

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the rows that match."""
        found = self.find(query, limit, SEARCHED_BYTES)
        is_full = query.line is not None
        return views_of(found, self._requests_of(found.rows if is_full else []), is_full=is_full)

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return the requests of rows by their custom IDs."""
        read = map(self._lines.line, lines) if self._requests else ()
        return self._requests_of([(raw.number, raw.data) for raw in read if raw is not None])

    def _requests_of(self, rows: Sequence[tuple[int, bytes | None]]) -> Requests:
        if self._requests is None:
            return Requests({}, _NO_FILE)
        found: dict[int, bytes] = {}
        for line, data in rows:
            facts = facts_of(data or b"")
            if facts is not None and facts.custom_id is not None:
                request = self._requests.request_of(line, facts.custom_id)
                found |= {} if request is None else {line: request}
        return Requests(found, _NO_REQUEST)
