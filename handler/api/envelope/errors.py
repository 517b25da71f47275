"""What the API refuses, in OpenAI's form; nothing that goes wrong inside is shown."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from aws_lambda_powertools.event_handler import Response, content_types
from aws_lambda_powertools.event_handler.openapi.exceptions import RequestValidationError
from pydantic_core import to_json

from handler.errors import HandlerError, InvalidOption
from handler.log import logger
from handler.tenants.limits import LimitReached

# A client chooses the names of what it nests.
_MAX_PARAM_CHARS: Final = 200
# What OpenAI's clients wait for at most when they are told to.
_MAX_WAIT_SECONDS = 60


class Refused(HandlerError):
    """A request that cannot be answered as it stands; `param` names what is wrong.

    With `retry_after_seconds` the same request will be answered a little later.
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
    """Something that is not there, or is another tenant's: nobody is told which."""

    code = "not_found"
    status = HTTPStatus.NOT_FOUND


class ComeAgain(Refused):
    """There is more to do than one request has time for; the next goes on with it."""

    code = "not_finished"
    status = HTTPStatus.SERVICE_UNAVAILABLE
    retry_after_seconds = 1

    def __init__(
        self,
        message: str = "This is not finished yet: call again, it goes on where it is.",
        *,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code)


def refuse(exc: Refused) -> Response[str]:
    """Return the answer to a request that was refused."""
    is_ours = exc.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if is_ours else "invalid_request_error"
    answer = error(exc.status, exc.message, kind=kind, param=exc.param, code=exc.code)
    if exc.retry_after_seconds is not None:
        answer.headers["Retry-After"] = str(exc.retry_after_seconds)
    return answer


def refuse_invalid(exc: RequestValidationError) -> Response[str]:
    """Return the answer to parameters that are not of their kind: the first of them is named."""
    found = exc.errors()[0]
    where = ".".join(str(part) for part in found["loc"][1:])[:_MAX_PARAM_CHARS]
    if not where:
        return error(HTTPStatus.BAD_REQUEST, "The request has no body.", code="missing_body")
    message = f"`{where}`: {found['msg']}."
    return error(HTTPStatus.BAD_REQUEST, message, param=where, code="invalid_parameter")


def refuse_option(exc: InvalidOption) -> Response[str]:
    """Return the answer to a parameter of a batch that cannot be."""
    return error(HTTPStatus.BAD_REQUEST, exc.message, param=exc.param, code=exc.code)


def refuse_more(exc: LimitReached) -> Response[str]:
    """Return the answer to more than the tenant may use, with the seconds to wait."""
    answer = error(
        HTTPStatus.TOO_MANY_REQUESTS, exc.message, kind="rate_limit_error", code=exc.code
    )
    answer.headers["Retry-After"] = str(exc.retry_after_seconds)
    if exc.retry_after_seconds > _MAX_WAIT_SECONDS:
        # OpenAI's clients would else try again at once, some times.
        answer.headers["x-should-retry"] = "false"
    return answer


def refuse_unknown(_: Exception) -> Response[str]:
    """Return the answer to a method and path that the API does not have."""
    return error(HTTPStatus.NOT_FOUND, "There is no such method and path here.", code="unknown_url")


def fail(exc: Exception) -> Response[str]:
    """Return the answer to a request that met a fault of ours, and log the fault."""
    logger.error("request failed", exc_info=exc)
    return error(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "Something went wrong on our side; try again in a moment.",
        kind="server_error",
        code="internal_error",
    )


def error(
    status: HTTPStatus,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response[str]:
    """Return an answer in OpenAI's form of errors."""
    body: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return Response(
        status_code=int(status),
        content_type=content_types.APPLICATION_JSON,
        body=to_json({"error": body}).decode(),
    )
