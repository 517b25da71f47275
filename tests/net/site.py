"""An HTTP server that looks like a public one to a fetch; each path has scripted responses."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from tidemill.net.pinned_connection import Network

HOST = "files.example.com"
PUBLIC = "8.8.8.8"


@dataclass(frozen=True, slots=True)
class Page:
    """How to answer requests for a path.

    `length` overrides the Content-Length header (-1: none). `hangs` sends only the first `hangs`
    bytes, `drips` sends one byte at a time.
    """

    data: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    hangs: int | None = None
    drips: bool = False


def moved(place: str, status: int = 302) -> Page:
    """Return a redirect."""
    return Page(status=status, headers={"Location": place})


@cache
def default_context() -> ssl.SSLContext:
    """Return a context that trusts the machine's authorities; reading them takes 20 ms."""
    return ssl.create_default_context()


class Site:
    """A server on the loopback interface under public names and addresses; a context manager.

    `pages` has the responses of each path: in turn, and the last one for all later requests.
    """

    def __init__(
        self, pages: dict[str, Page | Sequence[Page]], context: ssl.SSLContext | None = None
    ) -> None:
        self._pages = {
            path: [page] if isinstance(page, Page) else [*page] for path, page in pages.items()
        }
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.dialled: list[tuple[str, int]] = []
        self.has_request = threading.Event()
        self._ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = False
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def network(
        self,
        resolve: Callable[[str, int], list[str]] = lambda *_: [PUBLIC],
        context: ssl.SSLContext | None = None,
    ) -> Network:
        """Return a network whose hosts resolve by `resolve`, and all of them lead here."""

        def connect(place: tuple[str, int], timeout_seconds: float) -> socket.socket:
            self.dialled.append(place)
            return socket.create_connection(self._server.server_address[:2], timeout_seconds)

        return Network(
            resolve=resolve,
            connect=connect,
            context=context or default_context(),
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request with its path's next page."""
        path, _, _ = request.path.partition("?")
        pages = self._pages[path]
        page = pages.pop(0) if len(pages) > 1 else pages[0]
        self.requests.append((request.headers["Host"], request.path))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.has_request.set()
        request.close_connection = True
        request.send_response(page.status)
        for name, value in page.headers.items():
            request.send_header(name, value)
        length = len(page.data) if page.length is None else page.length
        if length >= 0:
            request.send_header("Content-Length", str(length))
        request.end_headers()
        with suppress(OSError):  # the other side has hung up
            self._write(request, page)

    def _write(self, request: BaseHTTPRequestHandler, page: Page) -> None:
        if page.drips:
            for byte in page.data:
                if self._ended.wait(0.01):
                    return
                request.wfile.write(bytes([byte]))
                request.wfile.flush()
            return
        request.wfile.write(page.data if page.hangs is None else page.data[: page.hangs])
        request.wfile.flush()
        if page.hangs is not None:
            self._ended.wait()


def _handler_of(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
