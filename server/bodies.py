"""Bodies of requests, read within bounds of bytes and of time."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.types import Receive, Scope

from engine.protocol.errors import RequestError
from server.clients import ClientGone
from server.errors import Refused, too_large

_LONG_BYTES = 100_000  # more than this is parsed in a thread


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, seconds: float) -> bytes:
    """Return the body of a request.

    Raises `Refused` for one that is too large or takes too long, `ClientGone` where it breaks off.
    """
    if (length := header(scope, b"content-length")) is not None and int(length) > max_bytes:
        raise too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise too_large(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(
            f"The body did not come within {seconds:g} s.",
            status_code=408,
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None


async def read_object(
    scope: Scope, receive: Receive, *, max_bytes: int, seconds: float
) -> dict[str, Any]:
    """Return the JSON object that a body is; raises as `read_body` does, and for what is none."""
    check_type(scope, "application/json")
    return await parsed(await read_body(scope, receive, max_bytes=max_bytes, seconds=seconds))


async def parsed(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes are; raises `RequestError` for what is none."""
    try:
        long = len(data) > _LONG_BYTES
        body = await asyncio.to_thread(from_json, data) if long else from_json(data)
    except ValueError as exc:
        raise RequestError(f"The body is not JSON: {exc}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return body


def check_type(scope: Scope, *wanted: str) -> None:
    """Raise `Refused` for a body of another type; one that names none is taken as it is."""
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
