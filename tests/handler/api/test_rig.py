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
    """Their names are in lower case, as in format 2.0."""
    headers = [("X-A", "1"), ("x-a", "2"), ("Cookie", "a=1; b=2")]
    answered(httpx.Request("GET", "http://x/health?b=1&a=2&b=", headers=headers))
    (event,) = events
    assert event["headers"]["x-a"] == "1,2"
    assert "cookie" not in event["headers"]
    assert event["cookies"] == ["a=1", "b=2"]
    assert event["rawQueryString"] == "b=1&a=2&b="
    assert event["queryStringParameters"] == {"a": "2", "b": "1,"}
