"""Bytes to a server over a socket, and the response."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from bench.server.served import Place
from tests.serve.conftest import KEY

_PATIENCE_SECONDS = 60


def connected(place: Place) -> socket.socket:
    """Return a connection to a server."""
    return socket.create_connection((place.host, place.port), timeout=_PATIENCE_SECONDS)


def exchange(place: Place, *parts: bytes, ends: bool = False) -> bytes:
    """Send bytes, and return everything that arrives until the server closes.

    With `ends`, the client shuts down its side after sending.
    """
    with connected(place) as held:
        try:
            for part in parts:
                held.sendall(part)
            if ends:
                held.shutdown(socket.SHUT_WR)
        except OSError as exc:
            if isinstance(exc, TimeoutError):
                raise
            # It has answered and closed before it received everything.
        return rest(held)


def rest(held: socket.socket) -> bytes:
    """Return everything that arrives until the server closes."""
    answer = bytearray()
    try:
        while part := held.recv(65_536):
            answer += part
    except ConnectionResetError:
        pass
    return bytes(answer)


def head(*lines: str, path: str = "/v1/chat/completions", key: str = KEY) -> bytes:
    """Return the headers of a POST with these lines."""
    first = [f"POST {path} HTTP/1.1", "Host: server", f"Authorization: Bearer {key}"]
    return "\r\n".join([*first, "Content-Type: application/json", *lines, "", ""]).encode()


def whole(body: bytes, *lines: str) -> bytes:
    """Return a request with the correct Content-Length."""
    return head(f"Content-Length: {len(body)}", *lines) + body


def chunked(*chunks: bytes) -> bytes:
    """Return a chunked body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def statuses(answer: bytes) -> list[int]:
    """Return the status of each response, if no body looks like one."""
    lines: Iterable[bytes] = answer.split(b"HTTP/1.1 ")[1:]
    return [int(line[:3]) for line in lines]
