"""Request bodies: read within limits of bytes, time and total memory (backpressure)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from tidemill.protocol.errors import RequestError
from tidemill.protocol.in_thread import LONG_BYTES
from tidemill.protocol.json_bodies import TooManyValues, load_json, unfolded_bytes

from .disconnect import ClientDisconnected
from .errors import Refused, busy, too_large

MAX_HELD_BYTES = 512 * 2**20
RESERVED_BYTES = 64 * 2**20
_ValueT = TypeVar("_ValueT")


def new_request_id() -> str:
    """Return a unique request id; it keys the randomness of a request without a seed."""
    return f"req_{uuid.uuid4().hex}"


class BodyReader:
    """Reads bodies of up to `max_bytes` within `seconds`, and holds `max_held_bytes` in all.

    Short bodies have `reserved_bytes` more, so slow uploads of long bodies do not block them.

    A body counts until its response is sent, together with the memory of its parsed values. So
    memory stays bounded under a thousand slow uploads and under a full queue.
    """

    def __init__(
        self,
        max_bytes: int,
        seconds: float,
        *,
        max_held_bytes: int = MAX_HELD_BYTES,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._max_held_bytes = max(max_bytes, max_held_bytes)
        self._reserved_bytes = reserved_bytes
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
        """Yield the parsed body of a request; it counts as held until this is left.

        Raises `Refused` for a body that is too large, too slow or over the limit of held bytes,
        `ClientDisconnected` when the upload breaks off, and the exceptions of `parse`.
        """
        if (length := header(scope, b"content-length")) and int(length) > self._max_bytes:
            raise too_large(self._max_bytes)
        data = await self._read_all(receive)
        num_bytes = len(data)
        try:
            unfolded = await _run(unfolded_bytes, data) if is_json else 0
            num_bytes += unfolded
            self._held_bytes += unfolded
            if self._held_bytes > max(self._limit(len(data)), num_bytes):
                raise busy(1)
            value = await parse(data)
            del data
            yield value
        finally:
            self._held_bytes -= num_bytes

    def read_object(
        self, scope: Scope, receive: Receive
    ) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Yield the body as a JSON object; raises as `read`, or `RequestError` for other JSON."""
        check_content_type(scope, "application/json")
        return self.read(scope, receive, parse_object)

    async def _read_all(self, receive: Receive) -> bytes:
        data = bytearray()
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in body_chunks(receive):
                    data += chunk
                    self._held_bytes += len(chunk)
                    self._check(len(data))
        except BaseException as exc:
            self._held_bytes -= len(data)
            if isinstance(exc, TimeoutError):
                raise body_timeout(self._seconds) from None
            raise
        return bytes(data)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        if self._held_bytes > self._limit(num_bytes):
            raise busy(1)

    def _limit(self, num_bytes: int) -> int:
        """Return the limit of held bytes for a body of this size."""
        is_long = num_bytes > LONG_BYTES
        return self._max_held_bytes + (0 if is_long else self._reserved_bytes)


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the chunks of a body; raises `ClientDisconnected` when it breaks off."""
    is_open = True
    while is_open:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        is_open = message.get("more_body", False)
        yield message.get("body", b"")


def body_timeout(seconds: float) -> Refused:
    """Return the 408 for a body that did not arrive in time."""
    return Refused(
        f"The request body did not arrive within {seconds:g} s.",
        status_code=408,
        code="body_timeout",
    )


async def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in these bytes; raises `RequestError`."""
    try:
        body = await _run(partial(load_json, in_slices=True), data)
    except TooManyValues as exc:
        raise Refused(
            f"The body {exc}: send less in one request.", status_code=413, code="body_too_large"
        ) from None
    except ValueError as exc:
        raise RequestError(f"The body is not JSON: {exc}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return body


async def _run(function: Callable[[bytes], _ValueT], data: bytes) -> _ValueT:
    """Apply a function to bytes, in a thread if there are many; a chat enters no file for it."""
    if len(data) > LONG_BYTES:
        return await asyncio.to_thread(function, data)
    return function(data)


def check_content_type(scope: Scope, *wanted: str) -> None:
    """Raise `Refused` (415) for another content type or an encoded body; it may be missing."""
    packed = (header(scope, b"content-encoding") or "identity").strip().lower()
    if packed != "identity":
        raise Refused(
            f"Content-Encoding {packed[:100]} is not supported: send the body uncompressed.",
            status_code=415,
            code="unsupported_media_type",
        )
    content_type = media_type(scope)
    if content_type and content_type not in wanted:
        raise Refused(
            f"Content-Type must be {' or '.join(wanted)}, not {content_type[:100]}.",
            status_code=415,
            code="unsupported_media_type",
        )


def media_type(scope: Scope) -> str:
    """Return the media type of a body without its parameters; empty when it has none."""
    value = header(scope, b"content-type") or ""
    return value.partition(";")[0].strip().lower()


def header(scope: Scope, name: bytes) -> str | None:
    """Return a header of a request."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None
