"""The Lambda on the intake queue, with messages as SQS hands them over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from localstack.event_source_mapping import LocalLambdaContext
from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import Queue, advance_message, intake_message
from tidemill.handler.deployment import deployment as cached_deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.lambdas import intake


@pytest.fixture
def cloud(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Return a deployment that the environment of this process names, with short ranges."""
    cloud = Cloud.on(ministack, shard_lines="4", range_bytes="1000")
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    cached_deployment.cache_clear()
    intake._aws.cache_clear()
    yield cloud
    cached_deployment.cache_clear()
    intake._aws.cache_clear()


def handle(body: dict[str, object], receipt: str = "handle") -> list[Any]:
    """Hand a message over and return those that must come again."""
    record = {
        "messageId": "message-0",
        "receiptHandle": receipt,
        "body": json.dumps(body),
        "attributes": {"ApproximateReceiveCount": "1"},
        "messageAttributes": {},
        "md5OfBody": "",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:us-east-1:000000000000:intake",
        "awsRegion": "us-east-1",
    }
    context = cast("LambdaContext", LocalLambdaContext("intake", 600))
    failed: list[Any] = intake.handler({"Records": [record]}, context)["batchItemFailures"]
    return failed


def test_a_file_is_taken_in_message_by_message(cloud: Cloud) -> None:
    """Each rings for those that come next; the shards are rung for at the end."""
    batch = cloud.create(lines_of(25))
    waiting = [intake_message(batch.id)]
    while waiting:
        assert handle(waiting.pop()) == []
        waiting += cloud.messages(cloud.deployment.intake)
    batch = cloud.batch(batch.id)
    assert batch.status is Status.IN_PROGRESS
    assert cloud.rung_shards() == list(range(batch.num_shards))


def test_messages_that_are_about_no_file_do_not_come_again(cloud: Cloud) -> None:
    """Neither do those about an unknown batch; nothing is done for them."""
    batch = cloud.create(lines_of(1))
    assert handle(advance_message(batch.id)) == []
    assert handle(intake_message("batch_unknown")) == []
    assert cloud.batch(batch.id).status is Status.VALIDATING


def test_a_message_that_fails_is_seen_again_in_seconds(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is hidden for seconds on its own queue."""
    queue: Queue = cloud.deployment.intake
    cloud.run(queue.send(intake_message("batch_any"), group="default"))

    def fail(*_: Any) -> None:
        raise AwsError("busy")

    monkeypatch.setattr(intake, "run_unit", fail)
    [message] = cloud.run(queue.receive(visibility_seconds=960))
    assert len(handle(intake_message("batch_any"), message.receipt)) == 1
    [again] = cloud.run(queue.receive(visibility_seconds=960))
    assert again.body == message.body
