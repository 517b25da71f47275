"""Bodies of requests, read within bounds of bytes and of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from engine.protocol.errors import RequestError
from engine.protocol.json_bodies import TooManyValues, load_json, unfolded_bytes
from server.clients import ClientGone
from server.errors import Refused, busy, too_large

MAX_HELD_BYTES = 512 * 2**20
_LONG_BYTES = 100_000  # more than this is parsed in a thread
_ValueT = TypeVar("_ValueT")


class Bodies:
    """Reads bodies: each of up to `max_bytes` within `seconds`, and of all at once so many bytes.

    What is read counts until its answer is sent, with what its values unfold to: a thousand slow
    uploads hold no more than that, and no more does what waits for its turn.
    """

    def __init__(
        self, max_bytes: int, seconds: float, *, max_held_bytes: int = MAX_HELD_BYTES
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._max_held_bytes = max(max_bytes, max_held_bytes)
        self._held_bytes = 0

    @asynccontextmanager
    async def read(
        self,
        scope: Scope,
        receive: Receive,
        parse: Callable[[bytes], Awaitable[_ValueT]],
        *,
        is_json: bool = True,
    ) -> AsyncIterator[_ValueT]:
        """Yield what `parse` makes of the body of a request, which counts until this is left.

        Raises `Refused` for one that is too large, takes too long or comes beside too many others,
        `ClientGone` where it breaks off, and what `parse` raises.
        """
        if (length := header(scope, b"content-length")) and int(length) > self._max_bytes:
            raise too_large(self._max_bytes)
        data = await self._whole(receive)
        num_bytes = len(data)
        try:
            unfolded = await _worked(unfolded_bytes, data) if is_json else 0
            num_bytes += unfolded
            self._held_bytes += unfolded
            if self._held_bytes > max(self._max_held_bytes, num_bytes):
                raise busy(1)
            value = await parse(data)
            del data
            yield value
        finally:
            self._held_bytes -= num_bytes

    def read_object(
        self, scope: Scope, receive: Receive
    ) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Yield the JSON object that a body is; raises as `read` does, and for what is none."""
        check_type(scope, "application/json")
        return self.read(scope, receive, parsed)

    async def _whole(self, receive: Receive) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in pieces(receive):
                    data += piece
                    self._held_bytes += len(piece)
                    self._check(len(data))
        except BaseException as exc:
            self._held_bytes -= len(data)
            if isinstance(exc, TimeoutError):
                raise late(self._seconds) from None
            raise
        return bytes(data)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if self._held_bytes > self._max_held_bytes:
            raise busy(1)


async def pieces(receive: Receive) -> AsyncIterator[bytes]:
    """Yield a body as it comes; raises `ClientGone` where it breaks off."""
    is_open = True
    while is_open:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        is_open = message.get("more_body", False)
        yield message.get("body", b"")


def late(seconds: float) -> Refused:
    """Return the refusal of a body that did not come in time."""
    return Refused(
        f"The body did not come within {seconds:g} s.", status_code=408, code="body_timeout"
    )


async def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes are; raises `RequestError` for what is none."""
    try:
        body = await _worked(load_json, data)
    except TooManyValues as exc:
        raise Refused(
            f"The body {exc}: send less in one request.", status_code=413, code="body_too_large"
        ) from None
    except ValueError as exc:
        raise RequestError(f"The body is not JSON: {exc}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return body


async def _worked(function: Callable[[bytes], _ValueT], data: bytes) -> _ValueT:
    """Return what a function makes of bytes, in a thread where they are many."""
    if len(data) > _LONG_BYTES:
        return await asyncio.to_thread(function, data)
    return function(data)


def check_type(scope: Scope, *wanted: str) -> None:
    """Raise `Refused` for a body of another type, or a packed one; none is taken as it is."""
    packed = (header(scope, b"content-encoding") or "identity").strip().lower()
    if packed != "identity":
        raise Refused(
            f"The body must not be packed, and Content-Encoding is {packed[:100]}: send it plain.",
            status_code=415,
            code="unsupported_media_type",
        )
    given = media_type(scope)
    if given and given not in wanted:
        raise Refused(
            f"The body must be {' or '.join(wanted)}, not {given[:100]}.",
            status_code=415,
            code="unsupported_media_type",
        )


def media_type(scope: Scope) -> str:
    """Return the type of a body without its parameters; empty where it has none."""
    value = header(scope, b"content-type") or ""
    return value.partition(";")[0].strip().lower()


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header of a request."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
