"""boto3's calls to an emulator as frames over a Unix socket: see `tests/framed_ministack.py`.

HTTP takes half of the CPU time of a call, and tests make more than a hundred thousand. Clients of
aiobotocore, other processes and other addresses, such as those of proxies, use HTTP.
"""

from __future__ import annotations

import io
import marshal
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from botocore import httpsession
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from botocore.useragent import UserAgentString

_LENGTH_BYTES: Final = 4
_send_http: Final = httpsession.URLLib3Session.send


class _Connections:
    """Idle connections to an emulator."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._pid = os.getpid()
        self._idle: list[socket.socket] = []

    @property
    def is_usable(self) -> bool:
        """Return whether connections are this process's: a fork must not share them."""
        return os.getpid() == self._pid

    def exchange(self, frame: bytes, seconds: float) -> bytes:
        """Return the answer to a request; each part of it comes within that time."""
        try:
            connection = self._idle.pop()  # another thread may take the last one
        except IndexError:
            connection = self._connect()
        try:
            connection.settimeout(seconds)
            connection.sendall(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)
            size = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
            answer = _receive(connection, size)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._path)
        except OSError:  # the emulator has ended
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop().close()


_EMULATORS: Final[dict[str, _Connections]] = {}


class _Body(io.BytesIO):
    """A response's body, with the methods of urllib3's that botocore calls."""

    def stream(self) -> Iterator[bytes]:
        yield self.read()

    def release_conn(self) -> None:
        """Do nothing: the connection is free."""


@contextmanager
def framed(endpoint_url: str, path: Path) -> Iterator[None]:
    """Send calls to `endpoint_url` over the socket at `path`, until the block is left."""
    connections = _EMULATORS[urlsplit(endpoint_url).netloc] = _Connections(path)
    try:
        yield
    finally:
        del _EMULATORS[urlsplit(endpoint_url).netloc]
        connections.close()


def install() -> None:
    """Let the clients of this process use frames, and keep a client's first user agent."""
    httpsession.URLLib3Session.send = _send
    UserAgentString.rebuild_and_replace_user_agent_handler = lambda *_, **__: None


def _send(session: Any, request: Any) -> Any:
    address = urlsplit(request.url)
    emulator = _EMULATORS.get(address.netloc)
    if emulator is None or not emulator.is_usable:
        return _send_http(session, request)
    body = request.body or b""
    if not isinstance(body, (bytes, bytearray, str)):
        body = body.read()
    headers = [(b"host", address.netloc.encode())]
    headers += [(_bytes(name).lower(), _bytes(value)) for name, value in request.headers.items()]
    target = f"{address.path or '/'}?{address.query}" if address.query else address.path or "/"
    frame = marshal.dumps((request.method, target, headers, _bytes(body)))
    timeout = session._timeout
    seconds = getattr(timeout, "read_timeout", timeout)
    try:
        answer = emulator.exchange(frame, seconds)
    except TimeoutError as exc:
        raise ReadTimeoutError(endpoint_url=request.url, error=exc) from exc
    except OSError as exc:
        raise ConnectionClosedError(endpoint_url=request.url, error=exc, request=request) from exc
    status, pairs, content = marshal.loads(answer)  # noqa: S302 - of our own emulator
    fields: dict[str, str] = {}
    for name, value in pairs:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    response = AWSResponse(request.url, status, fields, _Body(content))
    if not request.stream_output:
        response._content = content
    return response


def _receive(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size)
    if len(data) == size:
        return data
    parts = [data]
    while data and (size := size - len(data)):
        parts.append(data := connection.recv(size))
    if size:
        raise ConnectionResetError("the emulator has closed the connection")
    return b"".join(parts)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
