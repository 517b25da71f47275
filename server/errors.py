"""What is refused, in OpenAI's form; nothing that goes wrong inside is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.contract import Reply
from engine.errors import EngineError
from engine.protocol.bodies import error_body
from engine.protocol.errors import RequestError
from engine.protocol.validation import printable


class Refused(RequestError):
    """A request that is not answered as it stands; `headers` are sent with the refusal."""

    def __init__(
        self,
        message: str,
        *,
        status_code: int,
        code: str,
        param: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code, status_code=status_code, type=type)
        self.headers = dict(headers or {})


def too_large(max_bytes: int) -> Refused:
    """Return the refusal of a body that is larger than it may be."""
    return Refused(
        f"The body is larger than {max_bytes:,} bytes.",
        status_code=413,
        code="body_too_large",
    )


def busy(seconds: int) -> Refused:
    """Return the refusal of what would wait behind too many others."""
    return Refused(
        f"Too many requests are waiting: try again in {seconds} s.",
        status_code=429,
        code="queue_full",
        type="rate_limit_error",
        headers={"Retry-After": str(seconds)},
    )


def stopping(seconds: int) -> Refused:
    """Return the refusal of all that comes while the server finishes what it has."""
    return Refused(
        "The server is being stopped: it takes no new requests.",
        status_code=503,
        code="stopping",
        type="server_error",
        headers={"Retry-After": str(seconds), "Connection": "close"},
    )


def as_json(
    body: object, status_code: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a body as JSON."""
    return Response(to_json(body), status_code, headers, "application/json")


def refusal(error: RequestError) -> Response:
    """Return the answer to what is wrong with a request."""
    headers = error.headers if isinstance(error, Refused) else None
    body = error_body(error)
    body["error"]["message"] = printable(error.message)
    return as_json(body, error.status_code, headers)


async def answered(reply: Reply) -> Response:
    """Return the answer that the engine gave, printed in a thread where it is long."""
    printed = partial(as_json, reply.body, reply.status_code)
    return await asyncio.to_thread(printed) if reply.is_long else printed()


async def refuse(_: Request, exc: Exception) -> Response:
    """Answer what was raised for a request."""
    assert isinstance(exc, RequestError)
    return refusal(exc)


async def refuse_route(request: Request, exc: Exception) -> Response:
    """Answer a path that is not here, or a method that it does not have."""
    assert isinstance(exc, HTTPException)
    path = printable(request.url.path, 200)
    words, code = f"There is no {path} here.", "unknown_url"
    if exc.status_code == 405:
        words, code = f"{path} does not take {request.method}.", "method_not_allowed"
    return refusal(Refused(words, status_code=exc.status_code, code=code, headers=exc.headers))


async def fail(_: Request, exc: Exception) -> Response:
    """Answer a request that met a fault of ours; who runs the server logs it."""
    return refusal(fault_of(exc))


def fault_of(exc: Exception) -> RequestError:
    """Return a fault of ours as a client is told of it."""
    words: dict[str, Any] = {"message": "Something went wrong on our side.", "code": "internal"}
    if isinstance(exc, EngineError):
        words = {"message": "The engine cannot go on.", "code": exc.code}
    status_code = 503 if isinstance(exc, EngineError) else 500
    return RequestError(**words, status_code=status_code, type="server_error")
