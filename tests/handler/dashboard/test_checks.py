"""The check of a file before its upload, as the Lambda answers with it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from tests.emulators import MODEL
from tests.handler.api.rig import answer_to, body_as_sent, request_of
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.fleet import WorkerRate

LINES = lines_of(3)


def reply_to(*, has_key: bool = True, **changes: Any) -> dict[str, Any]:
    """Return the answer to a check of a file of three lines, with other fields."""
    event = request_of("/dashboard/view/check", "POST")
    event["headers"].pop("accept-encoding", None)
    event["headers"]["content-type"] = "application/json"
    if not has_key:
        del event["headers"]["authorization"]
    fields = {"name": "x.jsonl", "bytes": len(LINES), "head": b64encode(LINES).decode()}
    body = json.dumps(fields | changes).encode()
    return answer_to(event | body_as_sent(body, "application/json"))


def test_the_estimate_uses_the_rate_of_the_model(cloud: Cloud) -> None:
    """Before the model has run once, its time and cost are unknown."""
    assert "unknown until this model has run once" in reply_to()["body"]
    rate = WorkerRate(expected_work_per_second=1, num_gpus=1)
    cloud.run(cloud.deployment.fleets.put_rate(MODEL, rate))
    answer = reply_to()
    assert answer["statusCode"] == 200
    assert "JSONL of requests</strong>, 3 lines" in answer["body"]
    assert "data-ready" in answer["body"]
    # 3 × 512 tokens at 0.8 an hour
    assert "25 min" in answer["body"]
    assert "0.34" in answer["body"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"has_key": False}, 401),
        ({"head": 5}, 400),
        ({"bytes": -1}, 400),
        ({"name": "x" * 2000}, 400),
        ({"parts": [{"start": -1, "data": ""}]}, 400),
        ({"recipe": "{{ text }}"}, 400),
        ({"name": "\u202e<b>\0", "recipe": {"prompt": [[[{"x": 1}]]]}}, 200),
        ({"head": b64encode(b"text\nhi").decode(), "recipe": {"prompt": 1}}, 200),
        ({"head": b64encode(bytes(range(256))).decode(), "bytes": 2**60}, 200),
    ],
)
def test_no_body_is_an_internal_error(cloud: Cloud, changes: dict[str, Any], status: int) -> None:
    """Each answer is a page, or a sentence."""
    del cloud
    assert reply_to(**changes)["statusCode"] == status
