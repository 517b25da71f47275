"""Errors of the API in OpenAI's format; internal details are never shown."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from aws_lambda_powertools.event_handler import Response, content_types
from aws_lambda_powertools.event_handler.openapi.exceptions import RequestValidationError
from pydantic_core import to_json

from tidemill.batch.errors import HandlerError, InvalidOption
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.validation import predicate

from ...observability import logger
from ...tenants.limits import LimitReached

# Clients choose the names in nested parameters.
_MAX_PARAM_CHARS: Final = 200
# The longest `Retry-After` that OpenAI's clients follow.
_MAX_WAIT_SECONDS = 60


class Refused(HandlerError):
    """A refused request; `param` names the invalid parameter.

    With `retry_after_seconds` the same request can be retried after that time.
    """

    code = "invalid_request"
    status: HTTPStatus = HTTPStatus.BAD_REQUEST
    retry_after_seconds: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code


class NotFound(Refused):
    """An object that does not exist or is another tenant's; the response does not say which."""

    code = "not_found"
    status = HTTPStatus.NOT_FOUND


class Gone(Refused):
    """An object that existed and has been deleted."""

    code = "gone"
    status = HTTPStatus.GONE


class NotFinished(Refused):
    """More work than one request has time for; the next request continues it."""

    code = "not_finished"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after_seconds = 1

    def __init__(
        self,
        message: str = "The operation is not finished yet: repeat the request to continue it.",
        *,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)


def refuse(exc: Refused) -> Response[str]:
    """Return the response to a refused request."""
    is_ours = exc.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if is_ours else "invalid_request_error"
    answer = error(exc.status, exc.message, kind=kind, param=exc.param, code=exc.code)
    if exc.retry_after_seconds is not None:
        answer.headers["Retry-After"] = str(exc.retry_after_seconds)
    return answer


def refuse_invalid(exc: RequestValidationError) -> Response[str]:
    """Return the response to invalid parameters; it names the first of them."""
    found = exc.errors()[0]
    where = ".".join(str(part) for part in found["loc"][1:])[:_MAX_PARAM_CHARS]
    if not where:
        return error(HTTPStatus.BAD_REQUEST, "The request has no body.", code="missing_body")
    message = f"`{where}` {predicate(found)}."
    return error(HTTPStatus.BAD_REQUEST, message, param=where, code="invalid_parameter")


def refuse_option(exc: InvalidOption) -> Response[str]:
    """Return the response to an invalid option of a batch."""
    return error(HTTPStatus.BAD_REQUEST, exc.message, param=exc.param, code=exc.code)


def refuse_more(exc: LimitReached) -> Response[str]:
    """Return the 429 for a tenant above its limit, with `Retry-After`."""
    answer = error(
        HTTPStatus.TOO_MANY_REQUESTS, exc.message, kind="rate_limit_error", code=exc.code
    )
    answer.headers["Retry-After"] = str(exc.retry_after_seconds)
    if exc.retry_after_seconds > _MAX_WAIT_SECONDS:
        # OpenAI's clients would otherwise retry at once, several times.
        answer.headers["x-should-retry"] = "false"
    return answer


def refuse_unknown(_: Exception) -> Response[str]:
    """Return the 404 for an unknown method or path."""
    return error(HTTPStatus.NOT_FOUND, "Unknown method or path.", code="unknown_url")


def fail(exc: Exception) -> Response[str]:
    """Return the 500 for an internal failure, and log it."""
    logger.error("request failed", exc_info=exc)
    return error(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "Internal error; retry in a moment.",
        kind="server_error",
        code="internal_error",
    )


def error(
    status: HTTPStatus,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str,
) -> Response[str]:
    """Return an error response in OpenAI's format."""
    body = error_body(RequestError(message, type=kind, param=param, code=code))
    return Response(
        status_code=int(status),
        content_type=content_types.APPLICATION_JSON,
        body=to_json(body).decode(),
    )
