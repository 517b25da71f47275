"""Behaviour common to all routes: authentication, and the format of every error."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.handler.api.rig import URL, Gateway, answer_to, event_of, refusal_in, request_of
from tidemill.handler.api import app
from tidemill.handler.api.envelope.caller import Caller
from tidemill.handler.api.routers import batches, models
from tidemill.handler.errors import AwsError
from tidemill.handler.observability import logger

ROUTES = [
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/batch_1"),
    ("POST", "/v1/batches/batch_1/cancel"),
    ("DELETE", "/v1/batches/batch_1"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tidemill-demo"),
]


@pytest.fixture
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything uses the deployment or AWS."""

    def fail() -> Any:
        pytest.fail("AWS was called")

    monkeypatch.setattr(batches, "deployment", fail)
    monkeypatch.setattr(batches, "aws", fail)
    monkeypatch.setattr(models, "deployment", fail)
    monkeypatch.setattr(app, "admitted", lambda _: Caller("default"))


@pytest.mark.usefixtures("no_cloud")
def test_health_needs_no_key_and_calls_no_aws_service() -> None:
    """It reports to any caller whether this Lambda is up."""
    event = request_of("/health")
    del event["headers"]["authorization"]
    answer = answer_to(event)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"]) == {"status": "ok"}


@pytest.mark.usefixtures("cloud")
@pytest.mark.parametrize("authorizer", [None, {}, {"iam": {}}, {"lambda": {"tenant": "lab"}}])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_caller_without_a_key_is_refused(
    method: str, path: str, authorizer: dict[str, Any] | None
) -> None:
    """The caller is refused whatever else the request contains."""
    event = request_of(path, method)
    event["requestContext"]["authorizer"] = authorizer
    del event["headers"]["authorization"]
    status, error = refusal_in(answer_to(event))
    assert (status, error["code"]) == (401, "missing_api_key")


@pytest.mark.usefixtures("cloud")
def test_a_head_is_answered_as_a_get_without_its_body() -> None:
    """HEAD works on every path with a GET; on others it is a 404 like any method."""
    for path in ("/v1/batches", "/v1/models/tidemill-demo", "/health", "/"):
        head, get = (answer_to(request_of(path, method)) for method in ("HEAD", "GET"))
        assert head["statusCode"] == get["statusCode"] < 400
        assert head["body"] == ""
        assert set(head["headers"]) == set(get["headers"])
    assert answer_to(request_of("/v1/batches/batch_1/cancel", "HEAD"))["statusCode"] == 404


@pytest.mark.usefixtures("no_cloud")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/"),
        ("GET", "/v1"),
        ("GET", "/v1/batchess"),
        ("GET", "/v1/batches/batch_1/none"),
        ("DELETE", "/v1/batches"),
        ("GET", "/v1/batches/batch_1/cancel"),
        ("GET", "/v1/batches/"),
        ("GET", "/v1/batches/batch_1/"),
        ("GET", "//v1/batches"),
        ("GET", "/v1//batches"),
        ("GET", "/V1/batches"),
        ("GET", "/v1/files/../batches"),
        ("GET", "/dashboard/assets/../view/session"),
        ("GET", "/v1/batches\x00"),
        ("GET", "/v1/batches/\ud800"),
        ("OPTIONS", "/v1/batches"),
        ("PATCH", "/health"),
    ],
)
def test_a_method_and_path_that_are_not_there(method: str, path: str) -> None:
    """Any other path of OpenAI's, or another method of a path that there is."""
    status, error = refusal_in(answer_to(request_of(path, method)))
    assert (status, error["type"]) == (404, "invalid_request_error")
    assert error["code"] == "unknown_url"


@pytest.mark.parametrize("fault", [RuntimeError("shard 7 of 9"), AwsError("table tm-1 is gone")])
def test_a_fault_of_ours_is_logged_and_not_shown(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets the id under which the log has it, and nothing of what went wrong."""

    def fail() -> Any:
        raise fault

    monkeypatch.setattr(app, "admitted", lambda _: Caller("default"))
    monkeypatch.setattr(batches, "aws", fail)
    with caplog.at_level(logging.ERROR, logger="tidemill"):
        answer = answer_to(request_of("/v1/batches/batch_1"))
    status, error = refusal_in(answer)
    assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
    assert str(fault) not in json.dumps(answer)
    assert type(fault).__name__ not in json.dumps(answer)
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [fault]
    request_id = event_of("aws_http_request")["requestContext"]["requestId"]
    assert answer["headers"]["x-request-id"] == request_id
    assert logger.get_correlation_id() == request_id


@pytest.mark.parametrize(
    ("body", "is_base64"),
    [("", False), ("{", False), ("null", False), ("[1]", False), ("/+8=", True), ("\x00", False)],
)
def test_an_unexpected_body_is_ignored(client: OpenAI, *, body: str, is_base64: bool) -> None:
    """A cancel of an unknown batch is a 404 with any body."""
    del client
    event = request_of("/v1/batches/batch_1/cancel", "POST")
    event |= {"body": body, "isBase64Encoded": is_base64}
    assert refusal_in(answer_to(event))[0] == 404


def test_a_key_opens_the_api_and_another_word_does_not(client: OpenAI, token: str) -> None:
    """The SDK sends one request, and raises the exception that it raises for OpenAI's own 401."""
    assert list(client.batches.list()) == []
    for wrong in (token[:-1], f"{token}x", "sk-1"):
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key=wrong, max_retries=2).batches.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.request_id
    with httpx.Client(transport=Gateway(), base_url=URL) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/batches").json()["error"]["code"] == "missing_api_key"


def test_an_error_is_what_the_sdk_knows(client: OpenAI) -> None:
    """Its exception, with code, param and the request's id."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.retrieve("batch_none")
    assert caught.value.code == "batch_not_found"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
