"""One request to a checked address, without redirects."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from .pinned_connection import MIN_SECONDS, Network, PinnedConnection, deadline
from .ssrf_guard import Target

_MAX_TEXT_BYTES = 64 * 2**10


class Response(NamedTuple):
    """Response of a server: status and text."""

    status: int
    text: str

    @property
    def is_success(self) -> bool:
        """Say whether the server accepted the request."""
        return 200 <= self.status < 300

    @property
    def is_retryable(self) -> bool:
        """Say whether the same request may succeed later."""
        return self.status >= 500 or self.status in {408, 429}


class Request(NamedTuple):
    """Request to send; the `headers` of a streamed body contain its length."""

    method: str
    headers: dict[str, str]
    body: bytes | Iterable[bytes]


def put_stream(
    network: Network, target: Target, address: str, body: Iterable[bytes], num_bytes: int
) -> Response:
    """Return the response to a PUT of `num_bytes`; raises OSError or HTTPException without one."""
    headers = {"Content-Length": str(num_bytes), "Content-Type": "application/x-ndjson"}
    return send(network, target, address, Request("PUT", headers, body))


def send(network: Network, target: Target, address: str, request: Request) -> Response:
    """Return the response to a request; raises OSError or HTTPException without one.

    Redirects are not followed. A response whose body does not arrive has empty text.
    """
    left = network.clock()
    connection = PinnedConnection(target, address, network, left)
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
            # A server that refuses before it has read everything may have sent a reason.
            broken = exc
        return _answer(connection, left)
    except (HTTPException, OSError):
        if broken is not None:
            raise broken from None
        raise
    finally:
        connection.close()


def _in_time(body: Iterable[bytes], left: Callable[[], float]) -> Iterator[bytes]:
    """Yield the body until the time is up, then raise TimeoutError."""
    for chunk in body:
        if left() <= MIN_SECONDS:
            raise TimeoutError("it reads the upload too slowly")
        yield chunk


def _answer(connection: HTTPConnection, left: Callable[[], float]) -> Response:
    connected, text = connection.sock, b""  # the connection drops it after the response
    with deadline(left(), connected):
        response = connection.getresponse()
    # The status counts even without its text.
    with suppress(HTTPException, OSError), deadline(left(), connected):
        text = response.read(_MAX_TEXT_BYTES)
    return Response(response.status, text.decode(errors="replace"))
