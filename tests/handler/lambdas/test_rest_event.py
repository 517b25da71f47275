"""Requests of a private API, whose gateway has events of another form."""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, event_of, give_key, refusal_in, serving
from tests.handler.intake.rig import Cloud
from tidemill.handler.lambdas.api import as_http_event


@pytest.fixture
def cloud(ministack: Emulator) -> Iterator[Cloud]:
    """Return a deployment that the environment of this process names."""
    with serving(Cloud.on(ministack)) as cloud:
        yield cloud


def rest_request(stage: str, path: str, method: str = "GET", **headers: str) -> dict[str, Any]:
    """Return a request of the SDK to a stage, with additional headers."""
    event = event_of("aws_rest_request")
    event |= {"path": path, "httpMethod": method}
    event["requestContext"]["stage"] = stage
    event["multiValueHeaders"] |= {name: [value] for name, value in headers.items()}
    return event


def test_a_request_of_the_sdk_is_answered(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    """A REST API's event gives the same reply as an HTTP API's; the log names the caller."""
    event = event_of("aws_rest_request")
    give_key(cloud, event["headers"]["Authorization"], "default")
    with caplog.at_level(logging.INFO, logger="tidemill"):
        answer = answer_to(event)
    assert set(answer) == {"statusCode", "headers", "body", "isBase64Encoded"}
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"])["object"] == "list"
    assert answer["headers"]["x-request-id"] == event["requestContext"]["requestId"]
    fields = vars(caplog.records[-1])
    assert (fields["message"], fields["status"], fields["method"]) == ("answered", 200, "GET")
    assert (fields["path"], fields["address"]) == ("/v1/batches", "10.0.0.7")


def test_a_file_comes_as_it_is(cloud: Cloud) -> None:
    """Its form is base64 in the event, whatever is in it."""
    del cloud
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xff.jsonl"\r\n\r\n'
        b"\x00\xff\r\n--b--\r\n"
    )
    kind = "multipart/form-data; boundary=b"
    event = rest_request("v1", "/files", "POST", **{"Content-Type": kind})
    event |= {"body": b64encode(body).decode(), "isBase64Encoded": True}
    assert json.loads(answer_to(event)["body"])["bytes"] == 2


def test_a_signature_is_the_tenants_of_drops(cloud: Cloud) -> None:
    """These events have the signer in another field."""
    del cloud
    event = rest_request("v1", "/batches")
    del event["multiValueHeaders"]["Authorization"]
    assert refusal_in(answer_to(event))[0] == 401
    event["requestContext"]["identity"]["userArn"] = "arn:aws:iam::123456789012:user/me"
    assert answer_to(event)["statusCode"] == 200


@pytest.mark.parametrize(
    ("stage", "path", "whole"),
    [
        ("v1", "/models/lab%2Flarge", "/v1/models/lab%2Flarge"),
        ("health", "/", "/health"),
        ("dashboard", "/assets/1/app.js", "/dashboard/assets/1/app.js"),
    ],
)
def test_a_stage_is_the_first_part_of_a_path(stage: str, path: str, whole: str) -> None:
    """A path without more has no slash at its end, as clients write it."""
    assert as_http_event(rest_request(stage, path))["rawPath"] == whole


def test_several_values_are_joined() -> None:
    """They are joined as an HTTP API does; a query is encoded again."""
    event = rest_request("v1", "/batches")
    event["multiValueQueryStringParameters"] = {"include[]": ["a b", "c"], "limit": ["2"]}
    event["multiValueHeaders"]["X-Two"] = ["1", "2"]
    found = as_http_event(event)
    assert found["queryStringParameters"] == {"include[]": "a b,c", "limit": "2"}
    assert found["rawQueryString"] == "include%5B%5D=a+b&include%5B%5D=c&limit=2"
    assert found["headers"]["x-two"] == "1,2"
