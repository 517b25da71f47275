"""Page server: serves the dashboard's page of rows on loopback, at a URL with a token.

It is read-only and accepts only GET. The Host header is checked against DNS rebinding, and the page
runs only its own scripts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qsl

from pydantic_core import to_json

from tidemill.dashboard import pages, rows_page
from tidemill.dashboard.assets import assets, type_of, url_of
from tidemill.dashboard.headers import headers
from tidemill.dashboard.row_export import PIECE_TYPE, export_piece
from tidemill.dashboard.row_query import BadQuery, RowQuery
from tidemill.dashboard.rows_page import (
    FoundRows,
    Requests,
    RowCounts,
    RowLinks,
    RowsHeading,
    RowsUnavailable,
    StoredRows,
)
from tidemill.dashboard.visible_text import visible

from ...console.errors import CliError
from .file_rows import FileRows
from .open_pages import OpenPage

_HOST: Final = "127.0.0.1"
_NAMES: Final = frozenset({_HOST, "localhost"})
_HTML: Final = "text/html; charset=utf-8"
_JSON: Final = "application/json"
_IDLE_SECONDS: Final = 30


class PageServer(ThreadingHTTPServer):
    """Server of a page, which listens once it is created; raises OSError if the port is in use."""

    daemon_threads = True  # a search ends with the process

    def __init__(self, page: OpenPage, page_rows: int, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__((_HOST, port), partial(_Handler, _Views(page, page_rows, self.token)))

    @property
    def url(self) -> str:
        """Return the URL of the page."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"


class _Views:
    """The page and its views."""

    def __init__(self, page: OpenPage, page_rows: int, token: str) -> None:
        self.token = token
        self._source = _Source(page)
        self._page_rows = page_rows
        self._links = RowLinks("#/", f"/{token}")
        self._heading = RowsHeading(
            visible(page.name),
            RowCounts(),
            page.rows.num_rows,
            can_export=isinstance(page.rows, FileRows),  # a table is already one
        )

    def render(self, name: str, fields: dict[str, str]) -> str | bytes | None:
        """Return a view by its name, or bytes of a download; None for an unknown one."""
        source, links = self._source, self._links
        match name:
            case "":
                return pages.page("none", links.views, has_batches=False)
            case "rows":
                return rows_page.rows(source, links, self._heading, fields, self._page_rows)
            case "requests":
                return rows_page.requests(source, links, fields.get("lines", ""), self._page_rows)
            case "export" if self._heading.can_export:
                return export_piece(source, fields)
        return None


class _Source:
    """Rows whose errors are for the page."""

    def __init__(self, page: OpenPage) -> None:
        self._rows = page.rows

    def find(self, query: RowQuery, limit: int, max_bytes: int) -> StoredRows:
        """Return the rows that match, as they are stored."""
        assert isinstance(self._rows, FileRows)
        with _errors_on_page():
            return self._rows.find(query, limit, max_bytes)

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the rows that match."""
        with _errors_on_page():
            return self._rows.search(query, limit)

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return the requests of lines."""
        with _errors_on_page():
            return self._rows.requests(lines)


@contextmanager
def _errors_on_page() -> Iterator[None]:
    try:
        yield
    except CliError as exc:
        raise RowsUnavailable(visible(str(exc))) from exc


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS

    def __init__(self, views: _Views, *arguments: object) -> None:
        self._views = views
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Respond with a view or with a file of the page."""
        path, _, fields = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        host, _, _ = self.headers.get("Host", "").partition(":")
        if host.lower() not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "Unknown host")
        elif token == "dashboard":  # its files contain no data
            self._send_file(path)
        elif not secrets.compare_digest(token.encode(), self._views.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "The token in the URL is missing or incorrect")
        else:
            self._send_view(name, dict(parse_qsl(fields)))

    def _send_file(self, path: str) -> None:
        name = path.rpartition("/")[2]
        if name in assets() and path == url_of(name):
            self._send(assets()[name], type_of(name))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_view(self, name: str, fields: dict[str, str]) -> None:
        try:
            found = self._views.render(name, fields)
        except (BadQuery, RowsUnavailable) as exc:  # of a download
            body = to_json({"error": {"message": str(exc)}})
            self._send(body, _JSON, HTTPStatus.BAD_REQUEST)
            return
        if found is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(found, _HTML if isinstance(found, str) else PIECE_TYPE)

    def _send(self, found: str | bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        data = found.encode(errors="replace") if isinstance(found, str) else found
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # the browser was closed, or requested other rows

    def end_headers(self) -> None:
        """End the headers of any response, including errors, with the security headers."""
        for name, value in headers().items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "tidemill"

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""
