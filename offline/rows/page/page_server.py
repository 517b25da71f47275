"""Page server: serves a page and its rows on loopback, to clients with the token in its URL.

It is read-only and accepts only GET. The Host header is checked against DNS rebinding, and the page
runs only its own script.
"""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from tidemill.dashboard.assets import assets, type_of

from ...console.errors import CliError
from .search import Event, Query, RowPages

_HOST: Final = "127.0.0.1"
_NAMES: Final = frozenset({_HOST, "localhost"})
_FOLDER: Final = Path(__file__).parent
_FILES: Final = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_SHARED: Final = frozenset({"rows.css"})  # files of the dashboard
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_IDLE_SECONDS: Final = 30
_MAX_DIGITS: Final = 15


class PageServer(ThreadingHTTPServer):
    """Server of pages, which listens once it is created; raises OSError if the port is in use."""

    daemon_threads = True  # a search ends with the process

    def __init__(self, pages: RowPages, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__((_HOST, port), partial(_Handler, pages, self.token))

    @property
    def url(self) -> str:
        """Return the URL of the page."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS

    def __init__(self, pages: RowPages, token: str, *arguments: Any) -> None:
        self._pages = pages
        self._token = token
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Respond with a file of the page, or with rows."""
        path, _, fields = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        host, _, _ = self.headers.get("Host", "").partition(":")
        if host.lower() not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "Unknown host")
        elif not secrets.compare_digest(token.encode(), self._token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "The token in the URL is missing or incorrect")
        elif name in _SHARED:
            self._start(type_of(name))
            self.wfile.write(assets()[name].encode())
        elif name in _FILES:
            file, kind = _FILES[name]
            self._start(kind)
            self.wfile.write((_FOLDER / file).read_bytes())
        else:
            self._answer(name, {key: each[0] for key, each in parse_qs(fields).items()})

    def _answer(self, name: str, fields: dict[str, str]) -> None:
        number = _number_of(fields.get("from", "1"))
        try:
            match name:
                case "about":
                    self._send(self._pages.about())
                case "row":
                    self._send(self._pages.row(number))
                case "rows":
                    kind, text = fields.get("kind", "all"), fields.get("text", "")
                    query = Query(number, kind, text, fields.get("id"))
                    self._start("application/x-ndjson")
                    with closing(self._pages.page(query)) as events:
                        for event in events:
                            self._write(event)
                case _:
                    self.send_error(HTTPStatus.NOT_FOUND)
        except ConnectionError:
            pass  # the browser was closed, or requested other rows
        except CliError as exc:
            self._send({"error": str(exc)})

    def _send(self, event: Event) -> None:
        self._start("application/json")
        self._write(event)

    def _start(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _write(self, event: Event) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")

    def end_headers(self) -> None:
        """End the headers of any response, including errors, with the security headers."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def version_string(self) -> str:
        """Return the name of the server, without versions."""
        return "tidemill"

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def _number_of(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
    return max(1, int(text)) if is_number else 1
