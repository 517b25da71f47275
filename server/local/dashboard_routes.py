"""Dashboard routes: the page, its files, its views over the store's batches, and downloads.

A browser downloads a file by a link, which cannot contain a key: a view returns a URL with a token.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.fleet import WorkerRate
from tidemill.batch.results_object import GONE_CODE
from tidemill.dashboard import pages, rows_page
from tidemill.dashboard.assets import assets, type_of, version
from tidemill.dashboard.batch_row import BatchRow
from tidemill.dashboard.check_request import CheckRequest
from tidemill.dashboard.checked_file import FileCheck, estimate
from tidemill.dashboard.failures import Failure, read_row
from tidemill.dashboard.headers import FOR_EVER, headers
from tidemill.dashboard.render import render
from tidemill.dashboard.retry_form import retry_values
from tidemill.dashboard.row_export import PIECE_TYPE, export_piece
from tidemill.dashboard.row_query import BadQuery
from tidemill.dashboard.rows_page import RowCounts, RowLinks, RowsHeading, RowsUnavailable
from tidemill.dashboard.tabs import TABS
from tidemill.protocol.errors import RequestError

from ..errors import json_response
from ..request_bodies import BodyReader
from .batch_routes import BatchRoutes
from .batch_rows import BatchRows
from .batches import StoredBatch
from .file_routes import FileRoutes
from .query_params import parse_model
from .rows import RowsGone
from .store import Store

_SITE: Final = pages.Site(currency=None)
_LINK_SECONDS: Final = 300
_MAX_SEARCHED: Final = 500
_MAX_FAILURES: Final = 1000
_HTML: Final = "text/html; charset=utf-8"
_NO_TABLES: Final = (
    "This server runs files of requests, not tables: run the table with `tidemill run`, or send "
    "its requests with `tidemill submit`."
)
_BODY_READER: Final = BodyReader(2**20, 30.0)


class DashboardRoutes:
    """The dashboard over a store; `models` are the names that requests may use."""

    def __init__(
        self,
        store: Store,
        batches: BatchRoutes,
        files: FileRoutes,
        models: Sequence[str],
        *,
        has_keys: bool,
    ) -> None:
        self._store = store
        self._batches = batches
        self._files = files
        self._models = models
        self._auth = "keys" if has_keys else "none"
        self._secret = secrets.token_bytes(32)

    def routes(self) -> list[Route]:
        """Return the routes."""
        view = "/dashboard/view"
        return [
            Route("/dashboard", self.show_page),
            Route("/dashboard/assets/{version}/{name}", self.show_asset),
            Route("/dashboard/files/{file_id}", self.download),
            Route(f"{view}/session", self.show_session),
            Route(f"{view}/batches", self.show_batches),
            Route(f"{view}/batches/{{batch_id}}", self.show_batch),
            Route(f"{view}/batches/{{batch_id}}/errors", self.show_errors),
            Route(f"{view}/batches/{{batch_id}}/rows", self.show_rows),
            Route(f"{view}/batches/{{batch_id}}/first-rows", self.show_first_rows),
            Route(f"{view}/batches/{{batch_id}}/requests", self.show_requests),
            Route(f"{view}/batches/{{batch_id}}/export", self.show_export),
            Route(f"{view}/batches/{{batch_id}}/retry", self.show_retry),
            Route(f"{view}/new", self.show_form),
            Route(f"{view}/check", self.show_check, methods=["POST"]),
            Route(f"{view}/files/{{file_id}}/link", self.show_link),
        ]

    async def show_page(self, _: Request) -> Response:
        """Return the page, which is the same for every caller."""
        return await _html(lambda: pages.page(self._auth))

    async def show_asset(self, request: Request) -> Response:
        """Return a file of the page, cacheable for ever; another version's is not found."""
        name = request.path_params["name"]
        if request.path_params["version"] != version() or name not in assets():
            raise RequestError(
                "File not found: reload the page.",
                code="unknown_asset",
                status_code=404,
                type="not_found_error",
            )
        shown = headers(cache=FOR_EVER)
        return Response(assets()[name], headers=shown, media_type=type_of(name))

    async def show_session(self, _: Request) -> Response:
        """Confirm the key, which was checked before; a local server has one tenant."""
        return json_response({"tenant": ""}, headers=headers())

    async def show_batches(self, request: Request) -> Response:
        """Return batches of a tab and with a name, newest first."""
        given = request.query_params
        tab = given.get("status", "") if given.get("status") in TABS else ""
        name, after = given.get("name", "").strip(), given.get("after")
        rows: list[BatchRow] = []
        num_searched, last, end = 0, after, None
        while len(rows) < pages.PAGE_BATCHES and num_searched < _MAX_SEARCHED:
            listed = await self._batches.page(pages.PAGE_BATCHES, last)
            read = await asyncio.to_thread(self._rows, listed.data)
            rows += [row for row in read if row.is_found(tab, name)]
            num_searched += len(read)
            end = (read[-1].wire.id, read[-1].wire.created_at) if listed.has_more else None
            if end is None:
                break
            last = end[0]
        search = pages.Search(tab, name, after, num_searched, end)
        return await _html(
            lambda: pages.batches(_SITE, [self._with_reason(row) for row in rows], search)
        )

    async def show_batch(self, request: Request) -> Response:
        """Return one batch."""
        wire = await self._batches.describe(request.path_params["batch_id"])
        return await _html(lambda: pages.batch(_SITE, *self._rows([wire])))

    async def show_errors(self, request: Request) -> Response:
        """Return the first failed rows of a batch."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        return await _html(
            lambda: pages.errors(
                self._failures(stored),
                num_failed=stored.progress.failed,
                has_ended=stored.batch.is_terminal,
            )
        )

    async def show_rows(self, request: Request) -> Response:
        """Return the rows of a batch that match a search, or one row in full."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        wire = self._batches.describe_stored(stored)

        def render_rows() -> str:
            heading = RowsHeading.of_batch(*self._rows([wire]))
            return rows_page.rows(*self._source(stored), heading, request.query_params)

        return await _html(render_rows)

    async def show_first_rows(self, request: Request) -> Response:
        """Return a few rows of a batch, failed ones first."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        done = stored.batch.final or stored.progress
        counts = RowCounts(done.failed, done.truncated)
        return await _html(lambda: rows_page.first_rows(*self._source(stored), counts))

    async def show_requests(self, request: Request) -> Response:
        """Return the requests of a few lines of a batch."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        lines = request.query_params.get("lines", "")
        return await _html(lambda: rows_page.requests(*self._source(stored), lines))

    async def show_export(self, request: Request) -> Response:
        """Return a piece of a CSV or Parquet file of the rows that match a search."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        source = BatchRows(self._store, stored)
        try:
            piece = await asyncio.to_thread(export_piece, source, request.query_params)
        except BadQuery as exc:
            raise RequestError(str(exc)) from exc
        except RowsUnavailable as exc:
            raise RequestError(str(exc), code=GONE_CODE, status_code=410) from exc
        return Response(piece, headers=headers(), media_type=PIECE_TYPE)

    async def show_retry(self, request: Request) -> Response:
        """Return the dialog of a retry; empty if nothing can be retried."""
        stored = await self._batches.stored(request.path_params["batch_id"])
        return await _html(lambda: render("retry.html", **retry_values(stored.batch, None)))

    async def show_form(self, _: Request) -> Response:
        """Return the form of a new batch."""
        return await _html(lambda: pages.form(self._models, runs_tables=False))

    async def show_check(self, request: Request) -> Response:
        """Return the check of a file before its upload."""
        async with _BODY_READER.read_object(request.scope, request.receive) as body:
            wanted = parse_model(CheckRequest, body)
        return await _html(lambda: self._check(wanted))

    async def show_link(self, request: Request) -> Response:
        """Return a URL of a file that is valid for a few minutes without the key."""
        file_id = (await asyncio.to_thread(self._files.stored, request))[0].id
        until = int(time.time()) + _LINK_SECONDS
        url = f"/dashboard/files/{file_id}?until={until}&token={self._token(file_id, str(until))}"
        return json_response({"url": url}, headers=headers())

    def download(self, request: Request) -> Response:
        """Send a file to the holder of a link."""
        until, token = (request.query_params.get(name, "") for name in ("until", "token"))
        expected = self._token(request.path_params["file_id"], until)
        if not hmac.compare_digest(token.encode(), expected.encode()) or int(until) < time.time():
            raise RequestError(
                "The link has expired: open the batch in the dashboard and download it again.",
                code="link_expired",
                status_code=403,
                type="permission_error",
            )
        response = self._files.content(request)
        response.headers.update(headers())
        return response

    def _token(self, file_id: str, until: str) -> str:
        text = f"{file_id} {until}".encode(errors="replace")
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()

    def _check(self, wanted: CheckRequest) -> str:
        found = wanted.check({name: name for name in self._models}, runs_tables=False)
        if found.is_table:
            found = FileCheck(kind=found.kind, errors=(_NO_TABLES,), num_errors=1)
        expected = estimate(found, WorkerRate(), None)
        return pages.check(_SITE, found, expected, has_price=False)

    def _source(self, stored: StoredBatch) -> tuple[BatchRows, RowLinks]:
        return BatchRows(self._store, stored), RowLinks.of_batch(stored.batch.id)

    def _rows(self, wires: Sequence[BatchObject]) -> list[BatchRow]:
        """Return batches with the names of their files."""
        found = map(self._store.files.get, [wire.input_file_id for wire in wires])
        names = {file.id: file.filename for file in found if file}
        return [pages.row_of(wire, names) for wire in wires]

    def _with_reason(self, row: BatchRow) -> BatchRow:
        """Return a row of the list with its first error if it completed with errors."""
        stored = self._store.batches.get(row.wire.id) if row.is_with_errors else None
        failures = [] if stored is None else self._failures(stored, limit=1)
        return replace(row, first_error=failures[0].message) if failures else row

    def _failures(self, stored: StoredBatch, limit: int = _MAX_FAILURES) -> list[Failure]:
        """Return the first failed rows, and the lines that were not run.

        There are none once the result files are deleted.
        """
        try:
            page = self._store.results.page(stored.batch, 0, limit, failures_only=True)
        except RowsGone:
            return []
        return [failure for _, row in page.rows if (failure := read_row(row)) is not None]


async def _html(render: Callable[[], str]) -> Response:
    """Return HTML that is rendered in a thread, because a template may be long."""
    text = await asyncio.to_thread(render)
    # A name may contain an unpaired surrogate.
    return Response(text.encode(errors="replace"), headers=headers(), media_type=_HTML)
