"""HTTP connections pinned to checked addresses, and their timeouts."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from threading import Event, Timer
from time import monotonic

from .ssrf_guard import PORTS, Resolve, Target, resolve

# A socket with a timeout of 0 would not wait at all.
MIN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Network:
    """Network settings: the resolver, the dialler, the TLS context and the timeouts.

    A transfer fails after `stall_seconds` without progress, as do a handshake and a response that
    take longer; a single byte is progress. `whole_seconds` limits all steps of a request together.
    """

    resolve: Resolve = resolve
    connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection
    context: ssl.SSLContext = field(default_factory=ssl.create_default_context)
    stall_seconds: float = 30.0
    whole_seconds: float = math.inf

    def clock(self) -> Callable[[], float]:
        """Return a function that returns the timeout of a request's next step; it starts now."""
        until = monotonic() + self.whole_seconds
        return lambda: max(MIN_SECONDS, min(self.stall_seconds, until - monotonic()))


class PinnedConnection(HTTPConnection):
    """Dials an address that was already checked; Host, SNI and certificate are the host's."""

    def __init__(
        self, target: Target, address: str, network: Network, left: Callable[[], float]
    ) -> None:
        super().__init__(target.host, target.port)
        self.default_port = PORTS[target.scheme]  # left out of the Host header
        self._is_secure = target.scheme == "https"
        self._place = (address, target.port)
        self._network, self._left = network, left

    def connect(self) -> None:
        """Connect to that address; raises OSError."""
        plain = self._network.connect(self._place, self._left())
        if not self._is_secure:
            self.sock = plain
            return
        try:
            self.sock = self._network.context.wrap_socket(
                plain, server_hostname=self.host, do_handshake_on_connect=False
            )
        except BaseException:
            plain.close()
            raise
        with deadline(self._left(), self.sock):
            self.sock.do_handshake()


@contextmanager
def deadline(seconds: float, connected: socket.socket) -> Iterator[None]:
    """Break the connection after some seconds, and raise TimeoutError."""
    is_over = Event()

    def shut() -> None:
        is_over.set()
        with suppress(OSError):  # it has just been closed
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
        raise TimeoutError(f"timed out after {seconds:g} s")
