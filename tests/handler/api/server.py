"""The API of this process behind a real port, as the gateway serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread

import httpx

from tests.handler.api.rig import answered

# A Lambda answers one request at a time; what it may find in its module is one request's.
_ANSWERING = Lock()


class Bridge(BaseHTTPRequestHandler):
    """Hands each request to the gateway of this process."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        """Answer one request."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = f"http://{self.headers['host']}{self.path}"
        try:
            request = httpx.Request(self.command, url, headers=self.headers.items(), content=body)
        except httpx.InvalidURL:
            self.send_error(400)
            return
        with _ANSWERING:
            response = answered(request)
        # As it is on the wire: what came compressed stays so.
        body = response.content if response.is_closed else b"".join(response.iter_raw())
        self.send_response(response.status_code)
        for name, value in response.headers.items():
            if name not in {"content-length", "transfer-encoding"}:
                self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the parent's names
    do_PUT = do_PATCH = do_OPTIONS = do_HEAD = do_TRACE = do_QUERY = answer  # noqa: N815 - the parent's names

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what goes wrong is in the answers."""


@contextmanager
def listening(port: int = 0, bridge: type[Bridge] = Bridge) -> Iterator[str]:
    """Serve the deployment that this process belongs to until the block is left; yields the url."""
    server = ThreadingHTTPServer(("127.0.0.1", port), bridge)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
