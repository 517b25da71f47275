"""Request bodies: authenticates the caller first, then reads JSON or a form of any bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

from aws_lambda_powertools.event_handler import ApiGatewayResolver, Response
from aws_lambda_powertools.event_handler.middlewares import NextMiddleware
from aws_lambda_powertools.event_handler.middlewares.openapi_validation import (
    OpenAPIRequestValidationMiddleware,
)
from aws_lambda_powertools.event_handler.openapi.params import Form, UploadFile
from aws_lambda_powertools.utilities.data_classes import APIGatewayProxyEventV2

from tidemill.protocol.errors import RequestError
from tidemill.protocol.json_bodies import TooManyValues, load_json

from .errors import Refused

# Lambda's limit is 6 MB for the whole event, and a form is base64 in it.
MAX_BODY_BYTES: Final = 4_400_000


class TooLarge(Refused):
    """A body above Lambda's limit."""

    code = "request_too_large"
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyReader(OpenAPIRequestValidationMiddleware):
    """Reads bodies in place of powertools, whose reader of forms loses bytes and names.

    That reader splits a file if the boundary is inside a line, and fails at text that is not UTF-8.
    Powertools validates parameters before any other middleware, so `let_in`, which raises for an
    unauthenticated caller, is called here: no body is read before authentication.
    """

    def __init__(self, let_in: Callable[[ApiGatewayResolver], None]) -> None:
        self._let_in = let_in

    def handler(self, app: Any, next_middleware: NextMiddleware) -> Response[Any]:
        """Authenticate the caller, then validate the request and call the next middleware."""
        self._let_in(app)
        return super().handler(app, next_middleware)

    def _get_body(self, app: ApiGatewayResolver) -> Any:
        event = cast("APIGatewayProxyEventV2", app.current_event)
        body = body_of(event)
        content_type = (event.headers.get("content-type") or "").strip()
        fields = app.context["_route"].dependant.body_params
        if any(isinstance(field.field_info, Form) for field in fields):
            file_field = next(field.alias for field in fields if field.type_ is UploadFile)
            return _read_form(content_type, body, file_field)
        return read_json(content_type, body)


def body_of(event: APIGatewayProxyEventV2) -> bytes:
    """Return the body's bytes; API Gateway encodes binary bodies as base64."""
    text = event.body or ""
    try:
        body = base64.b64decode(text, validate=True) if event.is_base64_encoded else text.encode()
    except (binascii.Error, ValueError) as exc:
        raise Refused("The body is neither text nor base64.", code="invalid_body") from exc
    if len(body) > MAX_BODY_BYTES:
        raise TooLarge(
            f"The body has {len(body):,} bytes; the maximum is {MAX_BODY_BYTES:,}. Upload larger "
            "files in parts with `POST /v1/uploads` (`client.uploads.upload_file_chunked(..., "
            "part_size=4_000_000)`; without `part_size` the SDK sends parts of 64 MB, which are "
            "too large), or put them into the deployment's bucket under input/."
        )
    return body


def _read_form(content_type: str, body: bytes, file_field: str) -> dict[str, Any]:
    # Most requests have no form: the parser is loaded only for those that do.
    from tidemill.protocol.multipart import FormReader

    try:
        reader = FormReader(content_type, file_field)
        content = reader.read(body)
        reader.end()
    except RequestError as exc:
        raise Refused(exc.message, param=exc.param, code=exc.code) from exc
    found: dict[str, Any] = {**reader.fields, **reader.lists}
    if reader.has_file:
        found[file_field] = UploadFile(content=content, filename=reader.filename)
    return found


def read_json(content_type: str, body: bytes) -> Any:
    """Return a JSON object, None for an empty body; raises Refused."""
    if content_type.partition(";")[0].strip().lower() not in {"", "application/json"}:
        raise _unsupported("application/json")
    if not body.strip():
        return None
    try:
        found = load_json(body, allow_inf_nan=False)
    except TooManyValues as exc:
        raise TooLarge(f"The body {exc}.") from exc
    except ValueError as exc:  # nested too deeply, a lone surrogate, an infinite number, not UTF-8
        message = f"The body is not valid JSON: {str(exc)[:200]}."
        raise Refused(message, code="invalid_json") from exc
    if not isinstance(found, dict):
        raise Refused("The body must be a JSON object.", code="invalid_json")
    return found


def _unsupported(wanted: str) -> Refused:
    return Refused(f"The body must be {wanted}.", code="unsupported_content_type")
