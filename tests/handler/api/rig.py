"""An HTTP API in this process: events as API Gateway makes them, and the real Lambda."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl
from uuid import uuid4

import httpx
import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from localstack.event_source_mapping import LocalLambdaContext
from tests.handler.intake.rig import Cloud
from tidemill.handler.api.envelope.caller import aws
from tidemill.handler.aws.items import dump, to_item
from tidemill.handler.aws.stores.store import META
from tidemill.handler.deployment import deployment as cached_deployment
from tidemill.handler.lambdas import api
from tidemill.handler.tenants.keys import ApiKey

EVENTS = Path(__file__).parents[2] / "events"
URL = "https://api.test"
# Headers that API Gateway passes on unchanged.
_TEXTS = {"application/json", "application/xml", "application/javascript"}


def event_of(name: str) -> dict[str, Any]:
    """Return a recorded event."""
    event: dict[str, Any] = json.loads((EVENTS / f"{name}.json").read_text(encoding="utf-8"))
    return event


def request_of(
    path: str, method: str = "GET", query: str = "", *, name: str = "aws_http_request"
) -> dict[str, Any]:
    """Return a recorded event with another path, method and query."""
    event = event_of(name)
    event |= {"rawPath": path, "rawQueryString": query}
    event.pop("queryStringParameters", None)
    if query:
        given: dict[str, list[str]] = {}
        for field, value in parse_qsl(query, keep_blank_values=True):
            given.setdefault(field, []).append(value)
        event["queryStringParameters"] = {field: ",".join(them) for field, them in given.items()}
    event["requestContext"]["http"] |= {"method": method, "path": path}
    return event


def answer_to(event: dict[str, Any]) -> dict[str, Any]:
    """Return what the Lambda answers."""
    return api.handler(event, cast("LambdaContext", LocalLambdaContext("api", 29)))


def refusal_in(answer: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of an answer that has to be one, in OpenAI's form."""
    assert answer["headers"]["Content-Type"] == "application/json"
    body = json.loads(answer["body"])
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return answer["statusCode"], error


def body_as_sent(body: bytes, content_type: str | None) -> dict[str, Any]:
    """Return the fields of an event that hold a body: as base64 unless its type is one of text."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind in _TEXTS:
        return {"body": body.decode(errors="replace"), "isBase64Encoded": False}
    if not body:
        return {"body": None, "isBase64Encoded": False}
    return {"body": b64encode(body).decode(), "isBase64Encoded": True}


def headers_as_sent(request: httpx.Request) -> dict[str, Any]:
    """Return the fields of an event that hold headers: in small letters, joined by commas.

    Cookies have a separate field.
    """
    headers: dict[str, str] = {}
    cookies: list[str] = []
    for name, value in request.headers.multi_items():
        if name == "cookie":
            cookies += [cookie.strip() for cookie in value.split(";")]
        else:
            headers[name] = f"{headers[name]},{value}" if name in headers else value
    return {"headers": headers, **({"cookies": cookies} if cookies else {})}


def answered(request: httpx.Request) -> httpx.Response:
    """Return what the gateway answers to a request, which it hands on as it comes."""
    path, query = request.url.path, request.url.query.decode()
    event = request_of(path, request.method, query) | headers_as_sent(request)
    headers = event["headers"]
    event |= body_as_sent(request.read(), headers.get("content-type"))
    event["requestContext"]["requestId"] = uuid4().hex
    answer = answer_to(event)
    body = answer.get("body") or ""
    content = b64decode(body) if answer.get("isBase64Encoded") else body.encode()
    return httpx.Response(
        answer["statusCode"], headers=answer["headers"], stream=httpx.ByteStream(content)
    )


class Gateway(httpx.BaseTransport):
    """Hands requests to the API's Lambda.

    Requests to other hosts go out: a redirect leads to the emulator.
    """

    def __init__(self) -> None:
        self._out = httpx.HTTPTransport()

    def close(self) -> None:
        """Let connections to the emulator go."""
        self._out.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        if request.url.host != httpx.URL(URL).host:
            return self._out.handle_request(request)
        return answered(request)


def give_key(cloud: Cloud, authorization: str, tenant: str, *, is_admin: bool = False) -> None:
    """Make a header that was recorded the key of a tenant."""
    _, key_id, secret = authorization.removeprefix("Bearer ").split("_", 2)
    secret_hash = sha256(secret.encode()).hexdigest()
    key = ApiKey(key_id, tenant, "recorded", secret_hash, created_at=1, is_admin=is_admin)
    item = to_item({"pk": f"KEY#{key_id}", "sk": META} | dump(key))
    cloud.aws.clients["dynamodb"].put_item(TableName=cloud.deployment.table.name, Item=item)


@contextmanager
def serving(cloud: Cloud) -> Iterator[Cloud]:
    """Let the Lambdas of this process belong to a deployment until the block is left.

    It knows the key of the recorded requests, which is of the tenant `default`.
    """

    def forget() -> None:
        for cached in (cached_deployment, aws):
            cached.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        forget()
        give_key(cloud, event_of("aws_http_request")["headers"]["authorization"], "default")
        yield cloud
        forget()
