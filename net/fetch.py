"""Fetches a client's URL: checks each host, and dials only the addresses that were checked.

A host that answers late, badly or not at all is retried a few times; a refusal is final. Proxies
are not used, because a proxy would resolve the addresses itself.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from itertools import islice
from threading import Lock
from time import monotonic
from urllib.parse import urljoin

from .backoff import exponential_delays, retry_async
from .pinned_connection import MIN_SECONDS, Network, PinnedConnection, deadline
from .ssrf_guard import Scheme, Target, UrlRefused, redact_url, resolve_target

_HEADERS = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
    "User-Agent": "tidemill",
}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAY_CHANGE = frozenset({408, 425, 429})
_CHUNK_BYTES = 2**16
_DELAY_FACTOR = 4.0
_MAX_TEXT_CHARS = 200


class FetchFailed(Exception):
    """The fetch failed or its result is not allowed; the message does not contain the URL.

    `is_retryable` means that the same request may succeed later. A failure that `is_of_service` is
    not the client's: a store that does not work.
    """

    def __init__(
        self, message: str, *, is_retryable: bool = False, is_of_service: bool = False
    ) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable
        self.is_of_service = is_of_service


class ByteBudget:
    """Limit of the bytes of several fetches together, counted as they arrive."""

    def __init__(self, max_bytes: float = math.inf) -> None:
        self._max_bytes = self._bytes_left = max_bytes
        self._lock = Lock()

    def acquire(self, num_bytes: int) -> None:
        """Count bytes that are about to be held; raises `FetchFailed` above the limit."""
        with self._lock:
            if num_bytes > self._bytes_left:
                raise FetchFailed(f"all downloads of the request exceed {self._max_bytes:,} bytes")
            self._bytes_left -= num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting the bytes of a failed fetch."""
        with self._lock:
            self._bytes_left += num_bytes


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of a fetch: bytes, redirects, retries, timeouts and allowed hosts.

    `whole_seconds` limits one try with all its redirects, `stall_seconds` each step of it and the
    wait for the next byte. `allowed_hosts` also limits redirects; None allows any public host.
    """

    max_bytes: int = 25 * 2**20
    max_redirects: int = 3
    whole_seconds: float = 60.0
    stall_seconds: float = 10.0
    max_tries: int = 3
    first_delay_seconds: float = 0.5
    allowed_hosts: frozenset[str] | None = None


class Fetcher:
    """Fetches in up to `max_at_once` threads; a waiting caller may be cancelled."""

    def __init__(
        self, limits: FetchLimits, network: Network | None = None, *, max_at_once: int = 16
    ) -> None:
        self._limits = limits
        network = network or Network()
        self._network = replace(
            network, stall_seconds=limits.stall_seconds, whole_seconds=limits.whole_seconds
        )
        self._threads = ThreadPoolExecutor(max_at_once, "tidemill-fetch")

    async def fetch(self, url: str, allowance: ByteBudget | None = None) -> bytes:
        """Return the content of an http or https URL; raises `FetchFailed`.

        The bytes count against the `allowance`.
        """
        allowance = allowance or ByteBudget()
        delays = exponential_delays(self._limits.first_delay_seconds, factor=_DELAY_FACTOR)
        return await retry_async(
            lambda: self._tried(url, allowance),
            islice(delays, self._limits.max_tries - 1),
            FetchFailed,
            lambda failure: failure.is_retryable,
        )

    async def _tried(self, url: str, allowance: ByteBudget) -> bytes:
        thread = _Thread()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._fetched, url, allowance, thread)
        except asyncio.CancelledError:
            thread.break_off()
            raise

    def _fetched(self, url: str, allowance: ByteBudget, thread: _Thread) -> bytes:
        """Try once, through all redirects."""
        until = monotonic() + self._limits.whole_seconds
        schemes: tuple[Scheme, ...] = ("https", "http")
        for _ in range(self._limits.max_redirects + 1):
            target = self._target(url, schemes)
            network = replace(self._network, whole_seconds=max(MIN_SECONDS, until - monotonic()))
            try:
                with _answer(network, target, thread) as answer:
                    if answer.status not in _REDIRECTS:
                        return self._read(answer, allowance)
                    url = urljoin(url, answer.headers.get("Location", ""))
            except (OSError, HTTPException, ValueError) as exc:
                raise _failure(exc, url) from exc
            if target.scheme == "https":
                schemes = ("https",)  # never downgrade an encrypted request
        raise FetchFailed(f"it redirects more than {self._limits.max_redirects} times")

    def _target(self, url: str, schemes: tuple[Scheme, ...]) -> Target:
        resolve, allowed = self._network.resolve, self._limits.allowed_hosts
        try:
            return resolve_target(url, resolve, schemes=schemes, allowed=allowed)
        except UrlRefused as exc:
            raise FetchFailed(str(exc)) from exc
        except OSError as exc:
            raise FetchFailed("its host was not found", is_retryable=True) from exc

    def _read(self, answer: HTTPResponse, allowance: ByteBudget) -> bytes:
        """Return a response's body; raises `FetchFailed` unless it is complete."""
        status, max_bytes = answer.status, self._limits.max_bytes
        if status != 200:
            is_retryable = status >= 500 or status in _MAY_CHANGE
            raise FetchFailed(f"its host returned HTTP {status}", is_retryable=is_retryable)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise FetchFailed("its host sent it compressed, although that was not requested")
        length = answer.length  # None without a Content-Length header
        _check_length(length or 0, length, max_bytes)
        data = bytearray()
        try:
            while chunk := answer.read(_CHUNK_BYTES):
                allowance.acquire(len(chunk))
                data += chunk
                if len(data) > max_bytes:
                    break
            _check_length(len(data), length, max_bytes)
        except BaseException:
            allowance.release(len(data))
            raise
        return bytes(data)


def _check_length(num_bytes: int, length: int | None, max_bytes: int) -> None:
    """Raise `FetchFailed` for more bytes than allowed, or fewer than `length`."""
    if num_bytes > max_bytes:
        raise FetchFailed(f"it is larger than {max_bytes:,} bytes")
    if length is not None and num_bytes < length:
        raise FetchFailed(f"only {num_bytes:,} of {length:,} bytes arrived", is_retryable=True)


class _Thread:
    """A fetch in its thread; another thread can break its connection."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connected: socket.socket | None = None
        self._is_over = False

    def hold(self, connected: socket.socket | None) -> None:
        """Record the socket in use; raises OSError once the fetch has been cancelled."""
        with self._lock:
            self._connected = connected
            if self._is_over:
                raise ConnectionAbortedError("the fetch was cancelled")

    def break_off(self) -> None:
        """Cancel the fetch: break its connection and any later one."""
        with self._lock:
            self._is_over = True
            if self._connected is not None:
                with suppress(OSError):  # it has just been closed
                    socket.socket.shutdown(self._connected, socket.SHUT_RDWR)


@contextmanager
def _answer(network: Network, target: Target, thread: _Thread) -> Iterator[HTTPResponse]:
    """Yield the response of a target's first reachable address, within the network's time limit."""
    left, until = network.clock(), monotonic() + network.whole_seconds
    for address in target.addresses:
        thread.hold(None)
        connection = PinnedConnection(target, address, network, left)
        with closing(connection):
            try:
                connection.connect()
            except ssl.SSLError:
                raise
            except OSError:
                if address == target.addresses[-1]:
                    raise
                continue
            connected = connection.sock  # the connection drops it after the response
            thread.hold(connected)
            with deadline(max(MIN_SECONDS, until - monotonic()), connected):
                connection.request("GET", target.path, headers=_HEADERS)
                with connection.getresponse() as answer:
                    yield answer
            return


def _failure(exc: Exception, url: str) -> FetchFailed:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return FetchFailed("the certificate of its host is not trusted")
    if isinstance(exc, TimeoutError):
        return FetchFailed("its host timed out", is_retryable=True)
    words = redact_url(f"{type(exc).__name__}: {exc}", url)[:_MAX_TEXT_CHARS]
    return FetchFailed(
        f"the download failed ({words})",
        is_retryable=not isinstance(exc, ValueError),
    )
