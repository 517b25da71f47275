"""Events of a REST API, as API Gateway sends them of an HTTP API (payload format 2.0).

A private API is a REST API. Its stage is the first part of each path (`infra.api.private_api`).
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

# A REST API takes no other fields of an answer.
_ANSWER: Final = ("statusCode", "headers", "body", "isBase64Encoded")


def is_rest(event: dict[str, Any]) -> bool:
    """Say whether an event is one of a REST API."""
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
    """Return an answer to an event of an HTTP API as one of a REST API."""
    return {name: answer[name] for name in _ANSWER if name in answer}
