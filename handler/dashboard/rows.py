"""Rows of a batch for the page, next to their requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aws_lambda_powertools.event_handler import Response

from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import Batch
from tidemill.batch.results_object import rows_deleted_message
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.row_cells import READ_BYTES, Row, read_cells
from tidemill.dashboard import rows_page
from tidemill.dashboard.row_export import PIECE_TYPE, export_piece
from tidemill.dashboard.row_query import BadQuery, RowQuery
from tidemill.dashboard.rows_page import (
    NO_INPUT,
    SEARCHED_BYTES,
    TOO_LONG,
    FoundRows,
    Requests,
    RowCounts,
    RowLinks,
    RowsHeading,
    RowsUnavailable,
    StoredRows,
    views_of,
)

from ..api.envelope.caller import aws
from ..api.envelope.errors import Gone, Refused
from ..api.routers.batches import describe_batches, kept_batch, router
from ..api.routers.results import part_cache
from ..aws.objects.object_file import open_object
from ..deployment import deployment
from ..errors import NotThere, ObjectChanged
from ..queries.batch_view import progress_of
from ..queries.row_finder import WorkGone
from ..queries.row_requests import read_requests
from ..queries.row_search import search_rows
from .page import html, serve_text
from .views import rows_of


def rows(batch_id: str, fields: Mapping[str, str]) -> Response[str]:
    """Return the rows that match a search, or one row in full."""
    batch = kept_batch(router.context, batch_id)
    (row,) = rows_of(describe_batches([batch]))
    heading, links = RowsHeading.of_batch(row), RowLinks.of_batch(batch_id)
    return html(rows_page.rows(_BatchRows(batch), links, heading, fields))


def first_rows(batch_id: str) -> Response[str]:
    """Return a few rows for the page of the batch; none if they cannot be listed any more."""
    batch = kept_batch(router.context, batch_id)
    done = aws().run(progress_of(deployment(), batch, time.time()))
    counts = RowCounts(done.failed, done.truncated)
    return html(rows_page.first_rows(_BatchRows(batch), RowLinks.of_batch(batch_id), counts))


def requests(batch_id: str, lines: str) -> Response[str]:
    """Return the requests of lines, which the page puts next to their rows."""
    source = _BatchRows(kept_batch(router.context, batch_id))
    return html(rows_page.requests(source, RowLinks.of_batch(batch_id), lines))


def export(batch_id: str, fields: Mapping[str, str]) -> Response[Any]:
    """Return the next piece of a file of rows."""
    source = _BatchRows(kept_batch(router.context, batch_id))
    try:
        return serve_text(export_piece(source, fields), PIECE_TYPE)
    except BadQuery as exc:
        raise Refused(str(exc)) from exc
    except RowsUnavailable as exc:
        raise Gone(str(exc), code=WorkGone.code) from exc


@dataclass(frozen=True, slots=True)
class _BatchRows:
    """The rows of one batch, as a source of the page."""

    batch: Batch

    def find(self, query: RowQuery, limit: int, max_bytes: int = SEARCHED_BYTES) -> StoredRows:
        """Return the rows that match, as they are stored."""
        place = aws(), deployment(), self.batch, part_cache()
        try:
            return search_rows(*place, query, limit=limit, max_bytes=max_bytes)
        except WorkGone as exc:
            raise RowsUnavailable(rows_deleted_message(self.batch)) from exc

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the rows that match."""
        if query.line is None:
            return views_of(self.find(query, limit), self.requests(()), is_full=False)
        with ThreadPoolExecutor(1) as pool:  # neither waits for the other
            reading = pool.submit(self.requests, (query.line,))
            found = self.find(query, limit)
        return views_of(found, reading.result(), is_full=True)

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return the requests of lines as far as one reply may read them."""
        cells = self._cells(lines)
        try:
            found = read_requests(aws(), deployment(), self.batch, part_cache(), lines)
        except (NotThere, ObjectChanged):
            return Requests({}, NO_INPUT, cells)
        return Requests(found, TOO_LONG, cells)

    def _cells(self, lines: Sequence[int]) -> Mapping[int, Row]:
        """Return rows of a table; none for a retry, whose lines are some of another batch's."""
        if not lines or not self.batch.is_table:
            return {}
        share = (min(lines) - 1) / max(1, self.batch.num_rows)
        if share * self.batch.input.num_bytes > 2 * READ_BYTES:
            return {}
        gone = suppress(NotThere, ObjectChanged, TableError, FormatError)
        with gone, open_object(aws(), self.batch.input) as file:
            return read_cells(file, lines)
        return {}
