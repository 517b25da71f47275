"""API Lambda: serves the HTTP API and the dashboard."""

from __future__ import annotations

import base64
import time
from typing import Any, Final
from urllib.parse import urlencode

from aws_lambda_powertools.utilities.typing import LambdaContext

from ..api.app import app
from ..api.envelope.caller import IS_HEAD, aws
from ..dashboard import routes as dashboard
from ..observability import logger

# A REST API accepts only these fields of a response.
_ANSWER: Final = ("statusCode", "headers", "body", "isBase64Encoded")


def is_rest(event: dict[str, Any]) -> bool:
    """Return whether an event comes from a REST API."""
    return "httpMethod" in event


def as_http_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return the same request as an event of an HTTP API."""
    context = event["requestContext"]
    identity = context["identity"]
    path = f"/{context['stage']}{event['path']}".rstrip("/")
    headers = event.get("multiValueHeaders") or {}
    query = event.get("multiValueQueryStringParameters") or {}
    http = {
        "method": event["httpMethod"],
        "path": path,
        "protocol": context.get("protocol", "HTTP/1.1"),
        "sourceIp": identity["sourceIp"],
        "userAgent": identity.get("userAgent") or "",
    }
    signed = {"authorizer": {"iam": {"userArn": arn}}} if (arn := identity.get("userArn")) else {}
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": urlencode(query, doseq=True),
        "headers": {name.lower(): ",".join(values) for name, values in headers.items()},
        **(
            {"queryStringParameters": {name: ",".join(values) for name, values in query.items()}}
            if query
            else {}
        ),
        "requestContext": {
            "requestId": context["requestId"],
            "stage": "$default",
            "http": http,
            **signed,
        },
        "body": event.get("body"),
        "isBase64Encoded": event.get("isBase64Encoded", False),
    }


def as_rest_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Convert a response for an HTTP API to one for a REST API."""
    return {name: answer[name] for name in _ANSWER if name in answer}


# Lambda encodes the response as a JSON string: quotes and backslashes could double a long one,
# beyond the limit of 6 MB. Base64 always adds a third.
_MAX_TEXT_CHARS = 1_000_000


def fit(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a response in a form that Lambda accepts, up to 4.4 MB."""
    body = answer.get("body")
    if answer.get("isBase64Encoded") or not body or len(body) <= _MAX_TEXT_CHARS:
        return answer
    return answer | {"body": base64.b64encode(body.encode()).decode(), "isBase64Encoded": True}


app.include_router(dashboard.router)


def respond(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Handle one request; a HEAD as a GET without its body."""
    http = event["requestContext"]["http"]
    if http["method"] != "HEAD":
        return fit(app.resolve(event, context))
    app.append_context(**{IS_HEAD: True})  # type: ignore[no-untyped-call]
    as_get = event["requestContext"] | {"http": http | {"method": "GET"}}
    answer = app.resolve(event | {"requestContext": as_get}, context)
    return answer | {"body": "", "isBase64Encoded": False}


# An event is never logged, whatever the environment: it contains the caller's key.
@logger.inject_lambda_context(log_event=False, correlation_id_path="requestContext.requestId")
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Handle one request of an HTTP API (payload format 2.0) or of a REST API.

    The logs contain its request ID. A REST API writes no access log, so this function does.
    """
    if not is_rest(event):
        return timed(event, context)
    event = as_http_event(event)
    answer = as_rest_answer(timed(event, context))
    http = event["requestContext"]["http"]
    request = {"method": http["method"], "path": http["path"], "address": http["sourceIp"]}
    logger.info("answered", status=answer["statusCode"], **request)
    return answer


def timed(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Handle one request; `Server-Timing` has its milliseconds, and those spent waiting for AWS."""
    started, waited = time.perf_counter(), aws().waiting.seconds
    answer = respond(event, context)
    total, waited = time.perf_counter() - started, aws().waiting.seconds - waited
    answer["headers"]["server-timing"] = f"total;dur={total * 1e3:.1f}, aws;dur={waited * 1e3:.1f}"
    answer["headers"]["x-request-id"] = event["requestContext"]["requestId"]
    return answer
