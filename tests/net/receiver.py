"""An HTTPS server that looks like a public one to a delivery; its responses are scripted."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tidemill.net.pinned_connection import Network

HOST = "files.example.com"
PUBLIC = "8.8.8.8"


@dataclass(frozen=True, slots=True)
class Script:
    """How to answer one request.

    `reads` reads its body first, `hangs` sends no response, `drips` sends the headers or the text
    one byte at a time without an end, and `babbles` is text that is not HTTP.
    """

    status: int = 200
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    reads: bool = True
    hangs: bool = False
    drips: Literal["headers", "text"] | None = None
    babbles: str | None = None


class Received(NamedTuple):
    """One received request."""

    path: str
    host: str | None
    length: str | None
    body: bytes
    method: str
    headers: dict[str, str]


class Receiver:
    """A server on the loopback interface whose certificate is for `HOST`; a context manager.

    `scripts` are used in turn, and the last one for all later requests.
    """

    def __init__(self, folder: Path, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.received: list[Received] = []
        self.dialled: list[tuple[str, int]] = []
        self._ended = threading.Event()
        certificate, key = _make_certificate(folder)
        self._certificate = certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = False
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

    def network(self, addresses: Sequence[str] = (PUBLIC,), stall_seconds: float = 30.0) -> Network:
        """Return a network where every host has these addresses, and all of them lead here."""

        def connect(place: tuple[str, int], timeout_seconds: float) -> socket.socket:
            self.dialled.append(place)
            return socket.create_connection(self._server.server_address[:2], timeout_seconds)

        return Network(
            resolve=lambda *_: list(addresses),
            connect=connect,
            context=ssl.create_default_context(cafile=str(self._certificate)),
            stall_seconds=stall_seconds,
        )

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request with the next script."""
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        request.close_connection = True
        if script.reads:
            length = request.headers["Content-Length"]
            body = request.rfile.read(int(length))
            headers = {name.lower(): value for name, value in request.headers.items()}
            method = request.command
            host = request.headers["Host"]
            self.received.append(Received(request.path, host, length, body, method, headers))
        if script.hangs:
            self._ended.wait()
            return
        if script.babbles is not None:
            request.wfile.write(script.babbles.encode())
            return
        if script.drips == "headers":
            request.wfile.write(b"HTTP/1.0 200 ")
            self._drip(request)
            return
        request.send_response(script.status)
        for name, value in script.headers.items():
            request.send_header(name, value)
        if script.drips == "text":
            request.end_headers()
            self._drip(request)
            return
        request.send_header("Content-Length", str(len(script.text.encode())))
        request.end_headers()
        request.wfile.write(script.text.encode())

    def _drip(self, request: BaseHTTPRequestHandler) -> None:
        with suppress(OSError):  # the other side has hung up
            while not self._ended.wait(0.02):
                request.wfile.write(b"x")
                request.wfile.flush()


def _handler_of(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            receiver.answer(self)

        do_POST = do_PUT  # noqa: N815 - as the server calls it

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate_path, key_path
