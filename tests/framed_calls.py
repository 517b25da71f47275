"""Calls of boto3 and aiobotocore to an emulator as frames over a Unix socket.

`tests/framed_ministack.py` is the other end. HTTP takes half of the CPU time of a call, and tests
make more than a hundred thousand. Other processes and other addresses, such as those of proxies,
use HTTP.
"""

from __future__ import annotations

import asyncio
import io
import marshal
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiobotocore.httpsession
from aiobotocore._helpers import resolve_awaitable
from aiobotocore.awsrequest import AioAWSResponse
from botocore import httpsession, parsers
from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSResponse
from botocore.compat import get_current_datetime
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from botocore.useragent import UserAgentString

_LENGTH_BYTES: Final = 4
_REPEAT_SECONDS: Final = 60.0
_send_http: Final = httpsession.URLLib3Session.send
_send_aiohttp: Final = aiobotocore.httpsession.AIOHTTPSession.send
_sign: Final = SigV4Auth.add_auth
_make_user_agent: Final = UserAgentString.to_string


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
            connection.sendall(frame)
            size = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
            answer = _receive(connection, size)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    async def exchange_async(self, session: Any, frame: bytes) -> bytes:
        """Return the answer to a request of a session, which owns its connections."""
        idle = vars(session).setdefault("_frame_connections", [])
        if idle:
            reader, writer = idle.pop()
        else:
            reader, writer = await asyncio.open_unix_connection(self._path)
            session._exit_stack.callback(writer.close)
        try:
            writer.write(frame)
            size = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
            answer: bytes = await reader.readexactly(size)
        except BaseException:
            writer.close()
            raise
        idle.append((reader, writer))
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


Request = tuple[str, str, list[tuple[bytes, bytes]], bytes]
_recording: Final = threading.local()


@contextmanager
def recorded() -> Iterator[list[Request]]:
    """Collect the requests of boto3's clients in this thread until the block is left."""
    requests: list[Request] = []
    _recording.requests = requests
    try:
        yield requests
        # A request whose answer came late was sent twice.
        requests[:] = {
            (method, target, body): each
            for each in reversed(requests)
            for method, target, _, body in [each]
        }.values()
        requests.reverse()
    finally:
        del _recording.requests


def repeat(endpoint_url: str, requests: Iterable[Request], name: str, other: str) -> None:
    """Send recorded requests with another name in place of one of the same length.

    Checksums of their bodies are left out. Raises RuntimeError if one is refused.
    """
    emulator = _EMULATORS[urlsplit(endpoint_url).netloc]
    old, new = name.encode(), other.encode()
    for method, target, headers, body in requests:
        kept = [
            (field, value.replace(old, new))
            for field, value in headers
            if not field.startswith((b"content-md5", b"x-amz-checksum"))
        ]
        request = (method, target.replace(name, other), kept, body.replace(old, new))
        status, _, content = _parsed(emulator.exchange(_framed(request), _REPEAT_SECONDS))
        if status >= 300:
            raise RuntimeError(f"{method} {target}: {content.decode()}")


class _Body(io.BytesIO):
    """A response's body, with the methods of urllib3's that botocore calls."""

    def stream(self) -> Iterator[bytes]:
        yield self.read()

    def release_conn(self) -> None:
        """Do nothing: the connection is free."""


class _AsyncBody:
    """A response's body, with the members of aiohttp's that aiobotocore uses."""

    def __init__(self, content: bytes) -> None:
        self._body = io.BytesIO(content)
        self.content = self
        self.close = self._body.close

    async def read(self, size: int = -1) -> bytes:
        return self._body.read(size)


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
    """Let the clients of this process use frames, whose signatures are not checked.

    A client's user agent does not change after its first call, and equal times are parsed once.
    """
    httpsession.URLLib3Session.send = _send
    aiobotocore.httpsession.AIOHTTPSession.send = _send_async
    SigV4Auth.add_auth = _add_auth
    UserAgentString.to_string = _user_agent
    UserAgentString.rebuild_and_replace_user_agent_handler = lambda *_, **__: None
    parsers.DEFAULT_TIMESTAMP_PARSER = lru_cache(1024)(parsers.DEFAULT_TIMESTAMP_PARSER)


def _add_auth(auth: Any, request: Any) -> None:
    """Name the credentials, as a signature does: the emulator reads the region from them."""
    has_form = type(auth) in {SigV4Auth, S3SigV4Auth} and auth.credentials is not None
    if not has_form or urlsplit(request.url).netloc not in _EMULATORS:
        _sign(auth, request)
        return
    request.context["timestamp"] = get_current_datetime().strftime(SIGV4_TIMESTAMP)
    auth._modify_request_before_signing(request)
    credential = f"AWS4-HMAC-SHA256 Credential={auth.scope(request)}"
    request.headers["Authorization"] = f"{credential}, SignedHeaders=host, Signature=0"


def _user_agent(creator: Any) -> str:
    config, text = getattr(creator, "_first", (None, ""))
    if not text or config is not creator._client_config:
        text = _make_user_agent(creator)
        creator._first = creator._client_config, text
    return text


def _send(session: Any, request: Any) -> Any:
    emulator = _emulator_of(request)
    if emulator is None:
        return _send_http(session, request)
    timeout = session._timeout
    seconds = getattr(timeout, "read_timeout", timeout)
    body = request.body or b""
    if not isinstance(body, (bytes, bytearray, str)):
        body = body.read()
    with _errors_of_botocore(request):
        answer = emulator.exchange(_frame(request, body), seconds)
    status, fields, content = _parsed(answer)
    response = AWSResponse(request.url, status, fields, _Body(content))
    if not request.stream_output:
        response._content = content
    return response


async def _send_async(session: Any, request: Any) -> Any:
    emulator = _emulator_of(request)
    if emulator is None:
        return await _send_aiohttp(session, request)
    body = request.body or b""
    if not isinstance(body, (bytes, bytearray, str)):
        body = await resolve_awaitable(body.read())
    with _errors_of_botocore(request):
        async with asyncio.timeout(session._timeout.sock_read):
            answer = await emulator.exchange_async(session, _frame(request, body))
    status, fields, content = _parsed(answer)
    response = AioAWSResponse(request.url, status, fields, _AsyncBody(content))
    if not request.stream_output:
        response._content = content
    return response


def _emulator_of(request: Any) -> _Connections | None:
    emulator = _EMULATORS.get(urlsplit(request.url).netloc)
    return emulator if emulator is not None and emulator.is_usable else None


@contextmanager
def _errors_of_botocore(request: Any) -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise ReadTimeoutError(endpoint_url=request.url, error=exc) from exc
    except (OSError, EOFError) as exc:
        raise ConnectionClosedError(endpoint_url=request.url, error=exc, request=request) from exc


def _frame(request: Any, body: Any) -> bytes:
    address = urlsplit(request.url)
    headers = [(b"host", address.netloc.encode())]
    headers += [(_bytes(name).lower(), _bytes(value)) for name, value in request.headers.items()]
    target = f"{address.path or '/'}?{address.query}" if address.query else address.path or "/"
    parts = (request.method, target, headers, _bytes(body))
    if (requests := getattr(_recording, "requests", None)) is not None:
        requests.append(parts)
    return _framed(parts)


def _framed(request: Request) -> bytes:
    frame = marshal.dumps(request)
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


def _parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    status, pairs, content = marshal.loads(answer)  # noqa: S302 - of our own emulator
    fields: dict[str, str] = {}
    for name, value in pairs:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return status, fields, content


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
