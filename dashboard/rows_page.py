"""Pages of rows next to their requests, for any source of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from tidemill.batch.parts import RowKind

from .batch_row import BatchRow
from .render import render
from .row_query import BadQuery, RowQuery, StatusFilter
from .row_view import RowView, row_view

PAGE_ROWS: Final = 25
SEARCHED_BYTES: Final = 16 * 2**20
"""Rows that one search reads at most: about half a second of an API Lambda."""

FOUND_BYTES: Final = 3 * 2**20
"""Matching rows after which a search ends: about a piece of a download."""

NO_INPUT: Final = "The input file is no longer available."
TOO_LONG: Final = "The request is too long to be read here."

_FIRST_ROWS: Final = 3
_MAX_DIGITS: Final = 16
_TITLES: Final = {"failed": "Failed rows", "truncated": "Truncated rows", "": "First rows"}


class RowsUnavailable(Exception):
    """Rows that cannot be shown; the message is for the page."""


class StoredRows(NamedTuple):
    """Matching rows with their lines; None replaces a row that is too large to read.

    `through` is the last searched line, and `next_after` the line after which another call
    continues; None at the end.
    """

    rows: list[tuple[int, bytes | None]]
    through: int
    next_after: int | None = None


class SearchedRow(NamedTuple):
    """A row that may match, None if it is too large to be read, and its kind if that is known."""

    line: int
    data: bytes | None
    kind: RowKind | None = None


class FoundRows(NamedTuple):
    """Matching rows as the page shows them; `missing` replaces requests that are unknown."""

    rows: list[RowView]
    through: int
    next_after: int | None = None
    missing: str = ""


class Requests(NamedTuple):
    """Requests by their lines, why the others are missing, and rows of the table behind them."""

    by_line: Mapping[int, bytes]
    missing: str
    cells: Mapping[int, Mapping[str, Any]] = MappingProxyType({})

    def view(self, line: int, data: bytes | None, *, is_full: bool = False) -> RowView:
        """Return a row next to its request."""
        request, cells = self.by_line.get(line), self.cells.get(line)
        return row_view(line, data, request, cells=cells, is_full=is_full)


class RowSource(Protocol):
    """Rows that the page shows; both methods raise RowsUnavailable."""

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the first rows that match, in line order, in full if it names their line."""

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return the requests of lines whose rows were shown without."""


class RowLinks(NamedTuple):
    """Addresses of rows: `page` after the `#` of the page's, and `views` for scripts."""

    page: str
    views: str

    @classmethod
    def of_batch(cls, batch_id: str) -> RowLinks:
        """Return the addresses of a batch's rows."""
        return cls(f"#/batches/{batch_id}/rows", f"/dashboard/view/batches/{batch_id}")


class RowCounts(NamedTuple):
    """Number of rows by status; zero where it is unknown."""

    failed: int = 0
    truncated: int = 0
    ok: int = 0

    @property
    def first_status(self) -> StatusFilter:
        """Return the status whose rows are shown first: failed, or else truncated."""
        if self.failed:
            return "failed"
        return "truncated" if self.truncated else ""


@dataclass(frozen=True, slots=True)
class RowsHeading:
    """Values for the heading and the search form; `num_rows` is None if it is unknown.

    `batch_id` is empty for rows that are not of a batch.
    """

    name: str
    counts: RowCounts
    num_rows: int | None = None
    has_ended: bool = True
    batch_id: str = ""
    can_export: bool = True

    @classmethod
    def of_batch(cls, row: BatchRow) -> RowsHeading:
        """Return the heading of a batch's rows."""
        wire, truncated = row.wire, row.wire.tidemill.truncated_rows
        counts = wire.request_counts
        by_status = RowCounts(counts.failed, truncated, counts.completed - truncated)
        return cls(row.name, by_status, counts.total, row.has_ended, wire.id)


def rows(
    source: RowSource,
    links: RowLinks,
    heading: RowsHeading,
    fields: Mapping[str, str],
    page_rows: int = PAGE_ROWS,
) -> str:
    """Return the rows that match a search, or one row in full."""
    query, found, problem = None, FoundRows([], 0), ""
    try:
        query = RowQuery.of(fields, heading.counts.first_status)
        found = source.search(query, page_rows if query.line is None else 1)
    except (BadQuery, RowsUnavailable) as exc:
        problem = str(exc)
    return render(
        "rows.html",
        links=links,
        heading=heading,
        query=query,
        found=found,
        rows=found.rows,
        problem=problem,
        searched=_searched(query, found, heading) if query else "",
        is_page=len(found.rows) == page_rows,
    )


def first_rows(source: RowSource, links: RowLinks, counts: RowCounts) -> str:
    """Return a few rows for the page of a batch; none if they cannot be listed any more."""
    status = counts.first_status
    try:
        found = source.search(RowQuery(status=status), _FIRST_ROWS).rows
    except RowsUnavailable:
        found = []
    return render("first_rows.html", rows=found, links=links, title=_TITLES[status])


def requests(source: RowSource, links: RowLinks, lines: str, page_rows: int = PAGE_ROWS) -> str:
    """Return the requests of lines, such as `1,2`, which the page puts next to their rows."""
    named = [text for text in lines.split(",") if text.isascii() and text.isdecimal()]
    numbers = [int(text) for text in named[:page_rows] if len(text) <= _MAX_DIGITS]
    wanted = [number for number in numbers if number > 0]
    try:
        found = source.requests(wanted)
    except RowsUnavailable as exc:
        found = Requests({}, str(exc))
    views = [found.view(line, b"{}") for line in wanted]
    return render("row_requests.html", rows=views, missing=found.missing, links=links)


def select_rows(
    rows: Iterable[SearchedRow], query: RowQuery, limit: int, *, max_bytes: int = SEARCHED_BYTES
) -> StoredRows:
    """Return the first rows that match, of rows that begin with the first line of the query.

    The search ends after `max_bytes` of them, and after `FOUND_BYTES` of those that match.
    """
    found: list[tuple[int, bytes | None]] = []
    through, num_bytes, found_bytes = query.begin - 1, 0, 0
    for line, data, kind in rows:
        if query.line not in {None, line}:
            break
        if query.matches_row(data, kind):
            if len(found) == limit:
                return StoredRows(found, found[-1][0], found[-1][0])
            found.append((line, data))
            found_bytes += len(data or b"")
        through = line
        num_bytes += len(data or b"")
        if query.line is not None:
            break
        if num_bytes >= max_bytes or found_bytes >= FOUND_BYTES:
            return StoredRows(found, through, through)
    return StoredRows(found, through)


def views_of(stored: StoredRows, requests: Requests, *, is_full: bool) -> FoundRows:
    """Return rows as the page shows them."""
    views = [requests.view(line, data, is_full=is_full) for line, data in stored.rows]
    return FoundRows(views, stored.through, stored.next_after, requests.missing)


def _searched(query: RowQuery, found: FoundRows, heading: RowsHeading) -> str:
    """Return how far a search that reads rows has come."""
    if not query.reads_rows:
        return ""
    first = query.after + 1
    if found.next_after is None:
        return f"Searched from line {first:,} to the end." if query.after else "Searched all rows."
    of = f" of about {heading.num_rows:,}" if heading.num_rows else ""
    return f"Searched lines {first:,} to {found.through:,}{of}."
