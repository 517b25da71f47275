"""Fetches a client's url: checks each host on the way, and dials the addresses that were checked.

A host that answers late, badly or not at all is asked again a few times; one that says no is not.
No proxy is asked, since it would find the addresses itself.
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
    """Nothing came, or nothing that may be taken; the words say why and do not hold the url.

    `is_retryable` where the same request may be answered otherwise later.
    """

    def __init__(self, message: str, *, is_retryable: bool = False) -> None:
        super().__init__(message)
        self.is_retryable = is_retryable


class ByteBudget:
    """Bytes that several fetches may bring together, counted while they come."""

    def __init__(self, max_bytes: float = math.inf) -> None:
        self._max_bytes = self._bytes_left = max_bytes
        self._lock = Lock()

    def acquire(self, num_bytes: int) -> None:
        """Count bytes that are about to be held; raises `FetchFailed` where they are too many."""
        with self._lock:
            if num_bytes > self._bytes_left:
                raise FetchFailed(
                    f"it and what else the request names are larger than {self._max_bytes:,} bytes"
                    " together"
                )
            self._bytes_left -= num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes no longer: their fetch has failed."""
        with self._lock:
            self._bytes_left += num_bytes


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of a fetch: bytes, redirects, retries, timeouts and allowed hosts.

    `whole_seconds` are for one try with all its redirects, `stall_seconds` for each step of it and
    for the next byte. `allowed_hosts` None is any that is public; each redirect is held to them.
    """

    max_bytes: int = 25 * 2**20
    max_redirects: int = 3
    whole_seconds: float = 60.0
    stall_seconds: float = 10.0
    max_tries: int = 3
    first_delay_seconds: float = 0.5
    allowed_hosts: frozenset[str] | None = None


class Fetcher:
    """Fetches in threads of its own, `max_at_once` of them; who waits may be cancelled."""

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
        """Return what an http or https url names; raises `FetchFailed`.

        What comes is taken from the `allowance`.
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
                schemes = ("https",)  # what was asked for in secret stays so
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
        """Return an answer's body; raises `FetchFailed` unless it is one, and whole."""
        status, max_bytes = answer.status, self._limits.max_bytes
        if status != 200:
            is_retryable = status >= 500 or status in _MAY_CHANGE
            raise FetchFailed(f"its host answers {status}", is_retryable=is_retryable)
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise FetchFailed("its host sends it compressed, which was not asked for")
        told = answer.length  # None where the host does not say
        _check_length(told or 0, told, max_bytes)
        data = bytearray()
        try:
            while chunk := answer.read(_CHUNK_BYTES):
                allowance.acquire(len(chunk))
                data += chunk
                if len(data) > max_bytes:
                    break
            _check_length(len(data), told, max_bytes)
        except BaseException:
            allowance.release(len(data))
            raise
        return bytes(data)


def _check_length(num_bytes: int, told: int | None, max_bytes: int) -> None:
    """Raise `FetchFailed` where more came than may, or less than was told."""
    if num_bytes > max_bytes:
        raise FetchFailed(f"it is larger than {max_bytes:,} bytes")
    if told is not None and num_bytes < told:
        raise FetchFailed(f"of {told:,} bytes only {num_bytes:,} came", is_retryable=True)


class _Thread:
    """A fetch in its thread: the connection that it waits for can be broken from another."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._connected: socket.socket | None = None
        self._is_over = False

    def hold(self, connected: socket.socket | None) -> None:
        """Take note of what is waited for; raises OSError when nobody waits any more."""
        with self._lock:
            self._connected = connected
            if self._is_over:
                raise ConnectionAbortedError("nobody waits for it any more")

    def break_off(self) -> None:
        """End what is waited for, and what would be waited for next."""
        with self._lock:
            self._is_over = True
            if self._connected is not None:
                with suppress(OSError):  # closed meanwhile
                    socket.socket.shutdown(self._connected, socket.SHUT_RDWR)


@contextmanager
def _answer(network: Network, target: Target, thread: _Thread) -> Iterator[HTTPResponse]:
    """Yield the answer of a target's first address that is there, within the network's time."""
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
            connected = connection.sock  # the connection lets go of it when it has answered
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
        return FetchFailed("its host is too slow", is_retryable=True)
    words = redact_url(f"{type(exc).__name__}: {exc}", url)[:_MAX_TEXT_CHARS]
    return FetchFailed(
        f"its host does not answer as it should ({words})",
        is_retryable=not isinstance(exc, ValueError),
    )
