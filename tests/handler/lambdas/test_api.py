"""The Lambda behind the HTTP API, with a recorded request."""

from __future__ import annotations

import json
import re

import pytest

from tests.emulators import Emulator
from tests.handler.api.rig import answer_to, event_of, give_key, serving
from tests.handler.intake.rig import Cloud
from tests.handler.lambdas.logs import log_of


def test_a_request_of_the_sdk_is_answered(ministack: Emulator) -> None:
    """The reply has API Gateway's format, the request's ID, and the times spent."""
    event = event_of("aws_http_request")
    with serving(Cloud.on(ministack)):
        answer = answer_to(event)
    assert answer["statusCode"] == 200
    assert json.loads(answer["body"])["object"] == "list"
    timing = re.fullmatch(
        r"total;dur=([\d.]+), aws;dur=([\d.]+)", answer["headers"].pop("server-timing")
    )
    assert timing
    assert 0 < float(timing[2]) < float(timing[1])
    assert answer["headers"] == {
        "Content-Type": "application/json",
        "x-request-id": event["requestContext"]["requestId"],
    }
    json.dumps(answer)


@pytest.mark.parametrize(("table", "status"), [(None, 200), ("none", 500)])
def test_the_callers_key_is_never_logged(
    ministack: Emulator, table: str | None, status: int
) -> None:
    """The key stays out of the log even if the environment enables event logs, or AWS fails."""
    event = event_of("aws_http_request")
    cloud = Cloud.on(ministack)
    give_key(cloud, event["headers"]["authorization"], "default")
    environment = dict(cloud.environment)
    log = log_of("api", event, environment | ({"TIDEMILL_TABLE": table} if table else {}))
    assert f'"statusCode": {status}' in log
    assert event["headers"]["authorization"][-43:] not in log
    assert '"correlation_id"' in log
