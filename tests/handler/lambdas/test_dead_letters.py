"""Messages that were received again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from pydantic_core import from_json, to_json

from localstack.event_source_mapping import LocalLambdaContext
from tests.emulators import MODEL, Emulator
from tests.handler.finalize.rig import Cloud
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.queues import advance_message, intake_message, shard_message
from tidemill.handler.aws.sync import Aws
from tidemill.handler.control.dead_letters import PATIENCE_SECONDS, handle_dead_letter
from tidemill.handler.deployment import deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.lambdas import dead_letters


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a separate deployment."""
    return Cloud.on(ministack)


def dead(cloud: Cloud, message: object, *, later: int = 0) -> None:
    """Handle one dead letter, now or that many seconds later."""
    body = message if isinstance(message, str) else to_json(message).decode()
    cloud.run(handle_dead_letter(cloud.deployment, body, int(time.time()) + later))


def rung(cloud: Cloud) -> list[dict[str, Any]]:
    """Return the messages that rang for shards."""
    return cloud.messages(queue=cloud.deployment.work[MODEL])


def test_a_shard_that_can_still_be_run_is_rung_for_again(mini: Cloud) -> None:
    """Messages die of workers that were stopped, too: the shard's own count decides."""
    drop = mini.drop(4).begin()
    drop.claim(0)
    dead(mini, shard_message(drop.id, 0))
    assert rung(mini) == [shard_message(drop.id, 0)]
    assert (drop.shard(0).abandoned, mini.messages()) == (None, [])


def test_a_shard_that_fails_again_and_again_is_given_up(mini: Cloud) -> None:
    """After the maximum of fruitless claims the batch gets an error and continues without it."""
    drop = mini.drop(4).begin()
    for _ in range(mini.deployment.settings.max_attempts):
        drop.claim(0)
    for _ in range(2):
        dead(mini, shard_message(drop.id, 0))
        assert "no new row in" in (drop.shard(0).abandoned or "")
        assert mini.messages() == [advance_message(drop.id)]
    assert rung(mini) == []


def test_a_shard_that_is_done_held_or_no_longer_wanted_is_left_alone(mini: Cloud) -> None:
    """A dead doorbell for something that needs none is dropped."""
    drop = mini.drop(8).begin()
    drop.run_shard(0)
    drop.claim(1, lease_seconds=60)
    cancelled = mini.drop(4, key="input/y.jsonl").begin().move(Status.CANCELLING)
    for batch_id, number in ((drop.id, 0), (drop.id, 1), (cancelled.id, 0), (drop.id, 7), ("b", 0)):
        dead(mini, shard_message(batch_id, number))
    assert (mini.messages(), rung(mini)) == ([], [])
    assert drop.shard(1).abandoned is None


def test_a_file_that_cannot_be_read_for_hours_fails(mini: Cloud) -> None:
    """The batch says that intake failed, and has a report."""
    drop = mini.drop(4)
    for later in (0, PATIENCE_SECONDS):
        dead(mini, advance_message(drop.id), later=later)
    assert drop.batch.status is Status.FAILED
    assert [error.code for error in drop.batch.errors] == ["internal_error"]
    assert drop.report()["errors"]["data"][0]["code"] == "internal_error"


def test_a_unit_of_a_file_is_tried_again_until_it_has_failed_for_hours(mini: Cloud) -> None:
    """It is handled like any message about the file: nothing runs until all units are done."""
    drop = mini.drop(4)
    unit = intake_message(drop.id, "scan-1")
    [sent] = [
        call.arguments
        for call in _recorded(
            mini.aws, handle_dead_letter(mini.deployment, to_json(unit).decode(), int(time.time()))
        )
        if call.method == "send_message"
    ]
    assert (from_json(sent["MessageBody"]), sent["DelaySeconds"]) == (unit, 300)
    assert sent["QueueUrl"] == mini.deployment.intake.url
    dead(mini, unit, later=PATIENCE_SECONDS)
    assert drop.batch.status is Status.FAILED


def test_an_outage_fails_no_file(mini: Cloud) -> None:
    """The number of messages does not count, but the time since the first failure does."""
    drop = mini.drop(4)
    for later in (0, 80 * 60, PATIENCE_SECONDS - 600):
        dead(mini, advance_message(drop.id), later=later)
    assert drop.batch.status is Status.VALIDATING
    assert drop.batch.failing_since is not None


def test_a_batch_that_does_not_advance_is_tried_again_later(mini: Cloud) -> None:
    """The obstacle may pass: the message comes again after five minutes."""
    drop = mini.drop(4).begin()
    operation = handle_dead_letter(mini.deployment, to_json(advance_message(drop.id)).decode(), 0)
    calls = list(_recorded(mini.aws, operation))
    sent = [call.arguments for call in calls if call.method == "send_message"]
    assert [message["DelaySeconds"] for message in sent] == [300]
    assert drop.batch.status is Status.IN_PROGRESS


def _recorded(aws: Aws, operation: Any) -> Iterator[Call]:
    """Run an operation and yield its calls."""
    response = None
    try:
        while True:
            call = operation.send(response)
            yield call
            response = aws._send(call)
    except StopIteration:
        return


def test_a_message_for_a_batch_that_has_ended_is_dropped(mini: Cloud) -> None:
    """Nothing rings for a batch that is over or unknown."""
    drop = mini.drop(4).begin().move(Status.CANCELLING)
    drop.finish()
    for batch_id in (drop.id, "batch_unknown"):
        dead(mini, advance_message(batch_id))
    assert mini.messages() == []
    assert mini.run(mini.deployment.table.get_batch("batch_unknown")) is None


def test_an_upload_whose_event_died_is_tried_again(mini: Cloud) -> None:
    """If the event had created a batch, that one gets a message, and fails at last."""
    drop = mini.drop(4, sequencer="00AB")
    event = {
        "Records": [
            {
                "eventName": "ObjectCreated:Put",
                "s3": {
                    "bucket": {"name": drop.batch.source.bucket},
                    "object": {"key": "input%2Fx.jsonl", "sequencer": sequencer},
                },
            }
            for sequencer in ("00AA", "00AB")
        ]
    }
    dead(mini, event)
    assert drop.batch.failing_since is not None
    dead(mini, event, later=PATIENCE_SECONDS)
    assert drop.batch.status is Status.FAILED


@pytest.mark.parametrize(
    "body",
    [
        "",
        "nonsense",
        "[]",
        "null",
        "{}",
        '{"batch_id": 7, "shard": 0}',
        '{"batch_id": "b", "shard": "0"}',
        '{"kind": "advance"}',
        '{"Event": "s3:TestEvent"}',
        '{"Records": [{}]}',
    ],
)
def test_nonsense_is_dropped(mini: Cloud, body: str) -> None:
    """A malformed message ends here, without a crash."""
    dead(mini, body)
    assert (mini.messages(), rung(mini)) == ([], [])


def record(body: object) -> dict[str, Any]:
    """Return a record as Lambda gets it from SQS."""
    return {
        "messageId": str(uuid4()),
        "receiptHandle": "r",
        "body": to_json(body).decode(),
        "attributes": {},
        "messageAttributes": {},
        "md5OfBody": "",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:us-east-1:000000000000:dead-letters",
        "awsRegion": "us-east-1",
    }


def test_messages_that_cannot_be_dealt_with_now_come_again(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of AWS is reported for that message only."""
    good, bad = mini.drop(4), mini.drop(4, key="input/y.jsonl")
    environment = mini.emulator.environment | mini.resources.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    deployment.cache_clear()
    dead_letters._aws.cache_clear()
    real = dead_letters.handle_dead_letter

    def fail(found: Any, body: str, now: int) -> Any:
        if bad.id in body:
            raise AwsError("the table is throttled")
        return real(found, body, now)

    monkeypatch.setattr(dead_letters, "handle_dead_letter", fail)
    records = [record(advance_message(drop.id)) for drop in (bad, good)]
    answer = dead_letters.handler({"Records": records}, LocalLambdaContext("dead_letters", 60))
    deployment.cache_clear()
    dead_letters._aws.cache_clear()
    assert answer == {"batchItemFailures": [{"itemIdentifier": records[0]["messageId"]}]}
    assert good.batch.failing_since is not None
    assert bad.batch.failing_since is None


def test_an_event_of_another_bucket_fails_no_batch(mini: Cloud) -> None:
    """The bucket, too, is part of what names the batch of an upload."""
    drop = mini.drop(4, sequencer="00AB")
    stored = {"bucket": {"name": "other"}, "object": {"key": "input/x.jsonl", "sequencer": "00AB"}}
    dead(mini, {"Records": [{"eventName": "ObjectCreated:Put", "s3": stored}]})
    assert drop.batch.status is Status.VALIDATING
