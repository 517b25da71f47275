"""API application: all routes and the error handlers; can be called without Lambda.

The Lambda adds the dashboard's routes, because the dashboard is a layer above the API.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Literal, cast

from aws_lambda_powertools.event_handler import (
    APIGatewayHttpResolver,
    ApiGatewayResolver,
    Response,
    content_types,
)
from aws_lambda_powertools.event_handler.exceptions import NotFoundError
from aws_lambda_powertools.event_handler.openapi.exceptions import RequestValidationError
from aws_lambda_powertools.utilities.data_classes import APIGatewayProxyEventV2
from pydantic import BaseModel
from pydantic_core import to_json

from tidemill.batch.errors import InvalidOption

from ..deployment import deployment
from ..observability import logger
from ..tenants.limits import LimitReached
from .envelope import errors
from .envelope.bodies import BodyReader
from .envelope.caller import Caller, aws, identify
from .open_paths import DOCUMENT, HEALTH, is_open
from .routers import batches, files, history, models, results, stats, uploads


def authenticate(app: ApiGatewayResolver) -> None:
    """Require a key for all paths that are not public, even if a route forgets to.

    Such requests are counted if their tenant has a request limit.
    """
    event = cast("APIGatewayProxyEventV2", app.current_event)
    if is_open(event.path):
        return
    caller = admitted(event)
    whose = {"subject": caller.subject} if caller.subject else {"key_id": caller.key_id}
    logger.info("request", tenant=caller.tenant, **whose)
    app.append_context(caller=caller)  # type: ignore[no-untyped-call]


def admitted(event: APIGatewayProxyEventV2) -> Caller:
    """Return the caller, with the request counted; raises Unauthorized and LimitReached."""
    now, here = time.time(), deployment()
    caller = aws().run(identify(event, here, now))
    aws().run(here.limits.admit_request(caller.tenant, now))
    return caller


def as_json(answer: object) -> str:
    """Return a reply as JSON text; only what must be is escaped."""
    return to_json(answer).decode()


# A reply that violates its route's schema is an internal error.
app = APIGatewayHttpResolver(
    enable_validation=True, response_validation_error_http_code=500, serializer=as_json
)
app._request_validation_middleware = BodyReader(authenticate)  # noqa: SLF001
app.include_router(batches.router)
app.include_router(history.router)
app.include_router(results.router)
app.include_router(stats.router)
app.include_router(files.router)
app.include_router(models.router)
app.include_router(uploads.router)


class HealthObject(BaseModel):
    """Liveness reply of the API."""

    status: Literal["ok"] = "ok"


@app.get(HEALTH)
def health() -> HealthObject:
    """Confirm that the API is up; needs no key and calls no AWS service."""
    return HealthObject()


@app.get(DOCUMENT, compress=True, include_in_schema=False)
def show_document() -> Response[str]:
    """Return the OpenAPI document of this API; needs no key and calls no AWS service."""
    # Imported late: hardly any request needs it, and every cold start would pay for it.
    from .document import text

    return Response(int(HTTPStatus.OK), content_types.APPLICATION_JSON, text(app))


app.not_found(errors.refuse_unknown)
app.exception_handler(errors.Refused)(errors.refuse)
app.exception_handler(LimitReached)(errors.refuse_more)
app.exception_handler(InvalidOption)(errors.refuse_option)
app.exception_handler(RequestValidationError)(errors.refuse_invalid)
app.exception_handler(NotFoundError)(errors.refuse_unknown)
app.exception_handler(Exception)(errors.fail)
