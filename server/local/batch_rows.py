"""Rows and requests of one batch, as a source of the dashboard's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.batch.results_object import rows_deleted_message
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import (
    NO_INPUT,
    SEARCHED_BYTES,
    TOO_LONG,
    FoundRows,
    Requests,
    RowsUnavailable,
    StoredRows,
    views_of,
)

from .batches import StoredBatch
from .rows import RowsGone
from .store import Store


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch of a store."""

    store: Store
    stored: StoredBatch

    def find(self, query: RowQuery, limit: int, max_bytes: int = SEARCHED_BYTES) -> StoredRows:
        """Return the rows that match, as they are stored."""
        try:
            return self.store.results.search(self.stored.batch, query, limit, max_bytes)
        except RowsGone as exc:
            raise RowsUnavailable(rows_deleted_message(self.stored.batch)) from exc

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the rows that match."""
        found = self.find(query, limit)
        named = [] if query.line is None else [query.line]
        return views_of(found, self.requests(named), is_full=query.line is not None)

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return the requests of lines as far as one reply may read them."""
        try:
            return Requests(self.store.input_lines.read(self.stored, lines), TOO_LONG)
        except FileNotFoundError:
            now = self.store.batches.get(self.stored.batch.id)
            if now is not None and now.batch.is_terminal and not self.stored.batch.is_terminal:
                return BatchRows(self.store, now).requests(lines)  # its input has moved
            return Requests({}, NO_INPUT)
