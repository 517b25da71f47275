"""Rows of a batch for the page, next to their requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from aws_lambda_powertools.event_handler import Response

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import Batch
from tidemill.batch.results_object import rows_deleted_message
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.row_cells import Row, read_cells
from tidemill.dashboard.render import render
from tidemill.dashboard.row_query import BadQuery, RowQuery, StatusFilter
from tidemill.dashboard.row_view import RowView, row_view

from ..api.envelope.caller import aws
from ..api.routers.batches import describe_batches, kept_batch, router
from ..api.routers.results import part_cache
from ..aws.objects.object_file import open_object
from ..deployment import deployment
from ..errors import NotThere, ObjectChanged
from ..queries.batch_view import progress_of
from ..queries.row_finder import WorkGone
from ..queries.row_requests import read_requests
from ..queries.row_search import FoundRows, search_rows
from .page import html
from .views import rows_of

_PAGE_ROWS: Final = 25
_FIRST_ROWS: Final = 3
_NO_INPUT: Final = "The input file is no longer available."
_TOO_LONG: Final = "The request is too long to be read here."


class _Inputs(NamedTuple):
    """The requests and the rows of a table that are known of some lines, and why others are not."""

    requests: Mapping[int, bytes]
    cells: Mapping[int, Row]
    missing: str

    def view(self, line: int, data: bytes | None, **options: Any) -> RowView:
        """Return a row next to its request."""
        request, cells = self.requests.get(line), self.cells.get(line)
        return row_view(line, data, request, cells=cells, **options)


def rows(batch_id: str, fields: Mapping[str, str]) -> Response[str]:
    """Return the rows that match a search, or one row in full."""
    batch = kept_batch(router.context, batch_id)
    (row,) = rows_of(describe_batches([batch]))
    values = {
        "batch": row.wire,
        "batch_id": batch_id,
        "name": row.name,
        "has_ended": row.has_ended,
        "counts": _counts(row.wire),
        "query": None,
        "rows": [],
        "next_after": None,
        "problem": "",
    }
    default = _default_status(row.wire.request_counts.failed, row.wire.tidemill.truncated_rows)
    try:
        query = RowQuery.of(fields, default)
    except BadQuery as exc:
        return html(render("rows.html", **values | {"problem": str(exc)}))
    values["query"] = query
    try:
        found = _search(batch, query, _PAGE_ROWS if query.line is None else 1)
    except WorkGone:
        return html(render("rows.html", **values | {"problem": rows_deleted_message(batch)}))
    inputs = _inputs(batch, [] if query.line is None else [query.line])
    values["rows"] = [
        inputs.view(line, data, is_full=query.line is not None) for line, data in found.rows
    ]
    text = render(
        "rows.html",
        **values | {"next_after": found.next_after},
        missing=inputs.missing,
        searched=_searched(query, found, batch),
        is_page=len(found.rows) == _PAGE_ROWS,
    )
    return html(text)


def first_rows(batch_id: str) -> Response[str]:
    """Return a few rows for the page of the batch; none if they cannot be listed any more."""
    batch = kept_batch(router.context, batch_id)
    done = aws().run(progress_of(deployment(), batch, time.time()))
    status = _default_status(done.failed, done.truncated)
    try:
        found = _search(batch, RowQuery(status=status), _FIRST_ROWS).rows
    except WorkGone:
        found = []
    title = {"failed": "Failed rows", "truncated": "Truncated rows"}.get(status, "First rows")
    views = [row_view(line, data) for line, data in found]
    return html(render("first_rows.html", rows=views, batch_id=batch_id, title=title))


def requests(batch_id: str, lines: str) -> Response[str]:
    """Return the requests of lines, which the page puts next to their rows."""
    batch = kept_batch(router.context, batch_id)
    named = [text for text in lines.split(",") if text.isascii() and text.isdecimal()]
    wanted = [int(text) for text in named[:_PAGE_ROWS] if len(text) < 17]
    inputs = _inputs(batch, wanted)
    views = [inputs.view(line, b"{}") for line in wanted]
    return html(render("row_requests.html", rows=views, missing=inputs.missing, batch_id=batch_id))


def _search(batch: Batch, query: RowQuery, limit: int) -> FoundRows:
    return search_rows(aws(), deployment(), batch, part_cache(), query, limit=limit)


def _inputs(batch: Batch, lines: Sequence[int]) -> _Inputs:
    """Return the requests of lines, and the rows of a table that they were made of."""
    if not lines:
        return _Inputs({}, {}, "")
    cells = _cells(batch, lines)
    try:
        found = read_requests(aws(), deployment(), batch, part_cache(), lines)
    except (NotThere, ObjectChanged):
        return _Inputs({}, cells, _NO_INPUT)
    return _Inputs(found, cells, _TOO_LONG)


def _cells(batch: Batch, lines: Sequence[int]) -> Mapping[int, Row]:
    """Return rows of a table; none for a retry, whose lines are some of another batch's."""
    if batch.retry is None and batch.conversion is not None and batch.conversion.recipe is not None:
        gone = suppress(NotThere, ObjectChanged, TableError, FormatError)
        with gone, open_object(aws(), batch.input) as file:
            return read_cells(file, lines)
    return {}


def _default_status(num_failed: int, num_truncated: int) -> StatusFilter:
    """Return the status whose rows are shown first: the failed ones, or the truncated ones."""
    if num_failed:
        return "failed"
    return "truncated" if num_truncated else ""


def _counts(wire: BatchObject) -> dict[str, int]:
    completed, failed = wire.request_counts.completed, wire.request_counts.failed
    truncated = wire.tidemill.truncated_rows
    return {
        "all": completed + failed,
        "failed": failed,
        "truncated": truncated,
        "ok": completed - truncated,
    }


def _searched(query: RowQuery, found: FoundRows, batch: Batch) -> str:
    """Return how far a search that reads rows has come."""
    if not query.reads_rows:
        return ""
    first = query.after + 1
    if found.next_after is None:
        return f"Searched from line {first:,} to the end." if query.after else "Searched all rows."
    return f"Searched lines {first:,} to {found.through:,} of about {batch.num_rows:,}."
