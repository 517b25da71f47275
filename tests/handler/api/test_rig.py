"""The stand-in for API Gateway: events and refusals as AWS makes them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.handler.api import rig
from tests.handler.api.rig import answered


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what the Lambda is handed, which answers nothing."""
    found: list[dict[str, Any]] = []

    def answer(event: dict[str, Any]) -> dict[str, Any]:
        found.append(event)
        return {"statusCode": 204, "headers": {}}

    monkeypatch.setattr(rig, "answer_to", answer)
    return found


def test_headers_come_joined_and_cookies_apart(events: list[dict[str, Any]]) -> None:
    """In small letters, as format 2.0 has them."""
    headers = [("X-A", "1"), ("x-a", "2"), ("Cookie", "a=1; b=2")]
    answered(httpx.Request("GET", "http://x/health?b=1&a=2&b=", headers=headers))
    (event,) = events
    assert event["headers"]["x-a"] == "1,2"
    assert "cookie" not in event["headers"]
    assert event["cookies"] == ["a=1", "b=2"]
    assert event["rawQueryString"] == "b=1&a=2&b="
    assert event["queryStringParameters"] == {"a": "2", "b": "1,"}
    assert "authorizer" not in event["requestContext"]


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ({}, (401, {"message": "Unauthorized"})),
        ({"authorization": "Basic x"}, (403, {"message": "Forbidden"})),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/batches"), ("POST", "/health")])
def test_who_has_no_key_is_answered_by_the_gateway(
    events: list[dict[str, Any]],
    method: str,
    path: str,
    headers: dict[str, str],
    answer: tuple[int, dict[str, str]],
) -> None:
    """In its own words, and only a GET of what is public needs none."""
    said = answered(httpx.Request(method, f"http://x{path}", headers=headers))
    assert (said.status_code, said.json()) == answer
    assert events == []
