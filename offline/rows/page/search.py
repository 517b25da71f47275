"""Search: the rows of one page as events, which end when their reader closes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tidemill.dashboard.render import render
from tidemill.dashboard.row_view import row_view
from tidemill.dashboard.visible_text import visible

from ...console.errors import CliError
from ..view import ViewedRow, cut_text
from .row_source import RequestFile, RowSource

Event = dict[str, Any]

_MAX_CHARS: Final = 1_000
_MAX_ID_CHARS: Final = 200
_MAX_FULL_CHARS: Final = 2_000_000
_PROGRESS_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class Query:
    """A search for rows from a number on: `kind` is `all`, `failed` or a finish reason."""

    first_number: int = 1
    kind: str = "all"
    text: str = ""
    custom_id: str | None = None

    def matches(self, row: ViewedRow) -> bool:
        """Return whether a row has the kind, and the text in its custom ID, answer or error."""
        if self.kind == "failed" and not row.is_failed:
            return False
        if self.kind not in {"all", "failed"} and self.kind not in row.reasons:
            return False
        text = self.text.casefold()
        return not text or any(
            text in each.casefold() for each in (row.custom_id or "", row.text, row.request or "")
        )


@dataclass(frozen=True, slots=True)
class RowPages:
    """Pages of rows, each with its request if that is known."""

    source: RowSource
    requests: RequestFile | None
    page_rows: int

    def about(self) -> Event:
        """Return the name and the number of the rows."""
        return {"name": visible(self.source.name), "rows": self.source.count()}

    def page(self, query: Query) -> Generator[Event, None, None]:
        """Yield `row` and progress events, the start of the next page, and late requests.

        If a file has changed, the last event is an `error`.
        """
        try:
            yield from self._page(query)
        except CliError as exc:
            yield {"error": visible(str(exc))}

    def row(self, number: int) -> Event:
        """Return one row in full; raises CliError if a file has changed."""
        row = self.source.row(number)
        if row is None:
            return {"error": f"row {number:,} not found"}
        if row.data is None:
            return _wire(row, row.request, _MAX_FULL_CHARS)
        request = None if self.requests is None else self.requests.request_of(row)
        view = row_view(number, row.data, request, is_full=True)
        missing = "" if self.requests is None else "No request has this custom ID."
        return {"number": number, "html": render("one_row.html", row=view, missing=missing)}

    def _page(self, query: Query) -> Iterator[Event]:
        clock = _Clock()
        waiting: list[ViewedRow] = []
        num_found, number, following = 0, query.first_number - 1, None
        for row in self.source.rows(query.first_number, query.custom_id):
            number = number + 1 if row is None else row.number
            if row is None or not query.matches(row):
                if clock.is_time():
                    yield {"read": number}
                continue
            if num_found == self.page_rows:
                following = row.number
                break
            num_found += 1
            request = row.request
            if self.requests is not None:
                request = self.requests.on_same_line(row)
                if request is None and row.custom_id is not None:
                    waiting.append(row)
            yield {"row": _wire(row, request, _MAX_CHARS)}
        yield {"next": following}
        if waiting:
            yield from self._late_requests(waiting, clock)

    def _late_requests(self, rows: Sequence[ViewedRow], clock: _Clock) -> Iterator[Event]:
        """Yield requests on other lines than their rows, after indexing the file."""
        assert self.requests is not None
        for number in self.requests.build_index():
            if clock.is_time():
                yield {"indexed": number}
        for row in rows:
            text = cut_text(self.requests.find(row), _MAX_CHARS)
            yield {"request": visible(text), "number": row.number}


class _Clock:
    """Clock that limits the rate of progress events."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _PROGRESS_SECONDS

    def is_time(self) -> bool:
        """Return whether the next progress event is due; if so, schedule the following one."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _PROGRESS_SECONDS
        return True


def _wire(row: ViewedRow, request: str | None, max_chars: int) -> Event:
    fields = asdict(row) | {"request": request}
    limits = {"custom_id": _MAX_ID_CHARS, "words": _MAX_ID_CHARS}
    return {
        name: visible(cut_text(value, limits.get(name, max_chars)))
        if isinstance(value, str)
        else value
        for name, value in fields.items()
        if name not in {"reasons", "data"}
    } | {"reasons": [visible(each[:_MAX_ID_CHARS]) for each in row.reasons]}
