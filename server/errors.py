"""Error responses in OpenAI's format; internal errors show no details."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import EngineError, Reply
from tidemill.protocol.errors import RequestError
from tidemill.protocol.json_printing import discard, print_json
from tidemill.protocol.validation import printable
from tidemill.protocol.vendors.anthropic_answers import message_error

MESSAGES: Final = "/v1/messages"
"""Path of Anthropic's Messages API, and prefix of its other ones."""


class Refused(RequestError):
    """A refused request; `headers` are sent with the error response."""

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
    """Return the 413 for a body above the limit."""
    return Refused(
        f"The request body is larger than the limit of {max_bytes:,} bytes.",
        status_code=413,
        code="body_too_large",
    )


def busy(seconds: int) -> Refused:
    """Return the 429 for a full queue."""
    return Refused(
        f"Too many requests are queued: try again in {seconds} s.",
        status_code=429,
        code="queue_full",
        type="rate_limit_error",
        headers={"Retry-After": str(seconds)},
    )


def stopping(seconds: int) -> Refused:
    """Return the 503 for requests during graceful shutdown."""
    return Refused(
        "The server is shutting down and accepts no new requests.",
        status_code=503,
        code="stopping",
        type="server_error",
        headers={"Retry-After": str(seconds), "Connection": "close"},
    )


def json_response(
    body: object, status_code: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(to_json(body), status_code, headers, "application/json")


def error_response(error: RequestError, path: str) -> Response:
    """Return the response for an error of a request to a path; Anthropic's have another form."""
    headers = error.headers if isinstance(error, Refused) else None
    message = printable(error.message)
    if path.startswith(MESSAGES):
        return json_response(message_error(error.status_code, message), error.status_code, headers)
    body = error_body(error)
    body["error"]["message"] = message
    return json_response(body, error.status_code, headers)


async def reply_response(reply: Reply) -> Response:
    """Return the response for an engine reply; its body is empty afterwards if it is long."""
    return await printed_response(reply.body, reply)


async def printed_response(body: object, reply: Reply) -> Response:
    """Return the response with the body made of a reply; a long one is printed in a thread.

    It is empty afterwards: a slow client keeps only the printed bytes in memory.
    """
    if not reply.is_long:
        return json_response(body, reply.status_code)
    data = await asyncio.to_thread(_print_and_discard, body)
    return Response(data, reply.status_code, media_type="application/json")


def _print_and_discard(body: object) -> bytes:
    data = print_json(body)
    discard(body)
    return data


async def handle_request_error(request: Request, exc: Exception) -> Response:
    """Exception handler for `RequestError`."""
    assert isinstance(exc, RequestError)
    return error_response(exc, request.url.path)


async def handle_http_exception(request: Request, exc: Exception) -> Response:
    """Exception handler for unknown paths and methods."""
    assert isinstance(exc, HTTPException)
    path = printable(request.url.path, 200)
    words, code = f"The path {path} was not found.", "unknown_url"
    if exc.status_code == 405:
        words, code = f"{path} does not support {request.method}.", "method_not_allowed"
    return error_response(
        Refused(words, status_code=exc.status_code, code=code, headers=exc.headers),
        request.url.path,
    )


async def handle_internal_error(request: Request, exc: Exception) -> Response:
    """Exception handler for everything else; uvicorn logs the traceback."""
    return error_response(internal_error(exc), request.url.path)


def internal_error(exc: Exception) -> RequestError:
    """Return the error that a client sees for an internal failure."""
    words: dict[str, Any] = {"message": "Internal server error.", "code": "internal"}
    if isinstance(exc, EngineError):
        words = {"message": "The engine has failed: restart the server.", "code": exc.code}
    status_code = 503 if isinstance(exc, EngineError) else 500
    return RequestError(**words, status_code=status_code, type="server_error")
