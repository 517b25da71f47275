"""One request to a checked address, without redirects."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from threading import Event, Timer
from time import monotonic
from typing import NamedTuple

from handler.outbound.addresses import Resolve, Target, resolve

_MAX_TEXT_BYTES = 64 * 2**10
# A socket without any time left would not wait at all.
_MIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Network:
    """How hosts are reached: names to addresses, addresses to connections, and whom to trust.

    After `stall_seconds` without any progress a transfer is given up, and so are a handshake and an
    answer that take longer than that: one byte at a time is progress too. `whole_seconds` is for
    all steps of a request together.
    """

    resolve: Resolve = resolve
    connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection
    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    stall_seconds: float = 30.0
    whole_seconds: float = math.inf

    def clock(self) -> Callable[[], float]:
        """Return what tells, from now on, how long the next step of a request may take."""
        until = monotonic() + self.whole_seconds
        return lambda: max(_MIN_SECONDS, min(self.stall_seconds, until - monotonic()))


class Answer(NamedTuple):
    """What a server said to a request."""

    status: int
    text: str

    @property
    def is_success(self) -> bool:
        """Say whether what was sent has been taken."""
        return 200 <= self.status < 300

    @property
    def may_change(self) -> bool:
        """Say whether the same request may be answered otherwise later."""
        return self.status >= 500 or self.status in {408, 429}


class _PinnedConnection(HTTPSConnection):
    """Dials an address that was checked before; Host, SNI and certificate are the host's."""

    def __init__(
        self, target: Target, address: str, network: Network, left: Callable[[], float]
    ) -> None:
        super().__init__(target.host, target.port, context=network.context)
        self._place = (address, target.port)
        self._network, self._left = network, left

    def connect(self) -> None:
        plain = self._network.connect(self._place, self._left())
        try:
            self.sock = self._network.context.wrap_socket(
                plain, server_hostname=self.host, do_handshake_on_connect=False
            )
        except BaseException:
            plain.close()
            raise
        with _within(self._left(), self.sock):
            self.sock.do_handshake()


@contextmanager
def _within(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Break the connection after a while; raises TimeoutError then."""
    is_over = Event()

    def shut() -> None:
        is_over.set()
        with suppress(OSError):  # closed meanwhile
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    timer = Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (HTTPException, OSError):
        if not is_over.is_set():
            raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError(f"not done after {seconds:g} s")


class Request(NamedTuple):
    """What is sent: `headers` tell the length of a body that is no bytes."""

    method: str
    headers: dict[str, str]
    body: bytes | Iterable[bytes]


def put_stream(
    network: Network, target: Target, address: str, body: Iterable[bytes], num_bytes: int
) -> Answer:
    """Return the answer to a PUT of `num_bytes`; raises OSError or HTTPException without one."""
    headers = {"Content-Length": str(num_bytes), "Content-Type": "application/x-ndjson"}
    return send(network, target, address, Request("PUT", headers, body))


def send(network: Network, target: Target, address: str, request: Request) -> Answer:
    """Return the answer to a request; raises OSError or HTTPException without one.

    A redirect is an answer like any other. An answer whose words do not come has none.
    """
    left = network.clock()
    connection = _PinnedConnection(target, address, network, left)
    broken: OSError | None = None
    body = request.body
    try:
        try:
            connection.request(
                request.method,
                target.path,
                body=body if isinstance(body, bytes) else _in_time(body, left),
                headers=request.headers,
            )
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError) as exc:
            if connection.sock is None:
                raise
            # A server that refuses before it has read all may have said why.
            broken = exc
        return _answer(connection, left)
    except (HTTPException, OSError):
        if broken is not None:
            raise broken from None
        raise
    finally:
        connection.close()


def _in_time(body: Iterable[bytes], left: Callable[[], float]) -> Iterator[bytes]:
    """Yield the body while there is time; raises TimeoutError then."""
    for chunk in body:
        if left() <= _MIN_SECONDS:
            raise TimeoutError("it takes the bytes too slowly")
        yield chunk


def _answer(connection: HTTPSConnection, left: Callable[[], float]) -> Answer:
    connected, text = connection.sock, b""  # the connection lets go of it when it has answered
    with _within(left(), connected):
        response = connection.getresponse()
    # What the status says counts without its words.
    with suppress(HTTPException, OSError), _within(left(), connected):
        text = response.read(_MAX_TEXT_BYTES)
    return Answer(response.status, text.decode(errors="replace"))
