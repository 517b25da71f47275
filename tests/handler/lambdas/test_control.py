"""The Lambda on the control queue, with messages as SQS hands them over."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from aws_lambda_powertools.utilities.typing import LambdaContext

from localstack.event_source_mapping import LocalLambdaContext
from tests.emulators import Emulator
from tests.handler.emf import lines_in
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tests.handler.killing import is_killed_after
from tests.handler.lambdas.telling import listening
from tests.long_parameters import with_long
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import DROP_TENANT, outputs_of_drop
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.queues import (
    MAX_CONTROL_RECEIVES,
    Message,
    Queue,
    advance_message,
    intake_message,
)
from tidemill.handler.aws.sync import Aws
from tidemill.handler.control.advance import advance
from tidemill.handler.deployment import Deployment
from tidemill.handler.deployment import deployment as cached_deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.intake.control_messages import Drop, drop_message
from tidemill.handler.lambdas import control

EVENTS = Path(__file__).parents[2] / "events"


@pytest.fixture
def cloud(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """Return a deployment that the environment of this process names."""
    cloud = Cloud.on(ministack, shard_lines="10")
    for name, value in {**cloud.environment, "TIDEMILL_SHARD_LINES": "10"}.items():
        monkeypatch.setenv(name, value)
    cached_deployment.cache_clear()
    control._aws.cache_clear()
    yield cloud
    cached_deployment.cache_clear()
    control._aws.cache_clear()


def record_of(number: int, body: str) -> dict[str, Any]:
    """Return a message as Lambda gets it."""
    return {
        "messageId": f"message-{number}",
        "receiptHandle": "handle",
        "body": body,
        "attributes": {"ApproximateReceiveCount": "1"},
        "messageAttributes": {},
        "md5OfBody": "",
        "eventSource": "aws:sqs",
        "eventSourceARN": "arn:aws:sqs:us-east-1:000000000000:control",
        "awsRegion": "us-east-1",
    }


def handle(*bodies: str) -> list[str]:
    """Hand these messages over and return the numbers of those that must come again."""
    records = [record_of(number, body) for number, body in enumerate(bodies)]
    response = control.handler(
        {"Records": records}, cast("LambdaContext", LocalLambdaContext("control", 600))
    )
    failed = response["batchItemFailures"]
    return [item["itemIdentifier"].removeprefix("message-") for item in failed]


def message_of(cloud: Cloud, key: str, sequencer: str = "01") -> str:
    """Return the message about an upload."""
    return json.dumps(drop_message(Drop(cloud.bucket, key, sequencer)))


def newest(cloud: Cloud, key: str) -> str | None:
    """Return the id of the batch of a key."""
    outputs = outputs_of_drop(key)
    assert outputs is not None
    return cloud.run(cloud.deployment.table.newest_drop(cloud.bucket, outputs))


def test_an_upload_becomes_shards_that_are_rung_for(cloud: Cloud) -> None:
    """The event that the bucket itself has sent, through the handler, to the work queue.

    S3's events have no group: the drop is sent on in its tenant's. Both are in a separate
    queue: a flood of them does not delay messages about batches.
    """
    cloud.put(lines_of(25), "input/a b+ü.jsonl")
    deadline = time.monotonic() + 120
    bodies: list[str] = []
    while not any("ObjectCreated" in body for body in bodies) and time.monotonic() < deadline:
        receive = cloud.deployment.drops.receive(
            max_messages=10, wait_seconds=1, visibility_seconds=60
        )
        bodies += [message.body for message in cloud.run(receive)]
    assert handle(*bodies) == []
    assert newest(cloud, "input/a b+ü.jsonl") is None
    assert cloud.run(cloud.deployment.control.count()) == 0
    receive = cloud.deployment.drops.receive(wait_seconds=1, visibility_seconds=60)
    [drop] = cloud.run(receive)
    assert drop.group == DROP_TENANT
    assert handle(drop.body) == []
    batch_id = newest(cloud, "input/a b+ü.jsonl")
    assert batch_id is not None
    assert cloud.batch(batch_id).status is Status.IN_PROGRESS
    assert cloud.rung_shards() == [0, 1, 2]
    assert handle(drop.body) == []
    assert cloud.rung_shards() == []


@pytest.mark.parametrize("stride", with_long([3], [1]))
def test_the_run_of_a_drop_may_die_at_any_moment(cloud: Cloud, stride: int) -> None:
    """Killed before any one of its requests, it is made good by the message that comes again."""
    results: list[Any] = []
    was_killed = True
    while was_killed:
        key = f"input/{len(results)}.jsonl"
        cloud.put(lines_of(25), key)
        run = partial(
            control.handle_message, cloud.aws, cloud.deployment, message_of(cloud, key), plenty
        )
        with listening(cloud.aws) as statuses:
            was_killed = is_killed_after(stride * len(results), cloud.aws, run)
            rung = cloud.rung_shards()
            if batch_id := newest(cloud, key):
                left = cloud.batch(batch_id)
                assert left.status is Status.IN_PROGRESS or not rung
                # A message comes again long after the turn of the dead has lapsed.
                cloud.run(cloud.deployment.table.change_batch(left.id, left.status, turn_until=0))
            run()
        batch = cloud.batch(newest(cloud, key) or "none")
        assert batch.announced is batch.status is Status.IN_PROGRESS
        assert list(dict.fromkeys(statuses)) == ["in_progress"]
        assert {*rung, *cloud.rung_shards()} == {0, 1, 2}
        rows = [
            (shard.first_line, shard.num_rows, shard.start, shard.end)
            for shard in cloud.shards(batch.id)
        ]
        results.append((batch.num_rows, batch.num_shards, batch.shards_left, rows))
    assert stride * len(results) > 15
    assert all(result == results[-1] for result in results)


@pytest.mark.parametrize("stride", with_long([3], [1]))
def test_a_message_that_comes_again_at_once_waits_for_the_lock_of_the_dead(
    cloud: Cloud, stride: int
) -> None:
    """Wherever it died: the run behind the lock's end goes on; the holder alone would announce."""
    num_waited, num_calls, was_killed = 0, 0, True
    while was_killed:
        key = f"input/{num_calls}.jsonl"
        cloud.put(lines_of(25), key)
        run = partial(
            control.handle_message, cloud.aws, cloud.deployment, message_of(cloud, key), plenty
        )
        with listening(cloud.aws) as statuses:
            was_killed = is_killed_after(num_calls, cloud.aws, run)
            run()
            batch = cloud.batch(newest(cloud, key) or "none")
            if batch.status is Status.VALIDATING:
                num_waited += 1
                assert statuses == []
                assert cloud.run(cloud.deployment.intake.count()) == num_waited
                change = cloud.deployment.table.change_batch
                cloud.run(change(batch.id, batch.status, turn_until=0))
                body = json.dumps(intake_message(batch.id))
                control.handle_message(cloud.aws, cloud.deployment, body, plenty)
        assert statuses[-1] == "in_progress"
        batch = cloud.batch(batch.id)
        assert batch.announced is batch.status is Status.IN_PROGRESS
        assert batch.turn is None
        assert {*cloud.rung_shards()} == {0, 1, 2}
        num_calls += stride
    assert stride * num_waited > 5


def test_a_drop_is_cancelled_between_its_creation_and_its_reading(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer upload of its name cancels it: no shard gets a message, and its lock is released."""
    older, newer = (cloud.put(lines_of(25), "input/x.jsonl") for _ in range(2))
    advance_batch = control.advance_batch

    def advance_late(
        aws: Aws, deployment: Deployment, batch: Batch, *rest: Any, **how: Any
    ) -> None:
        monkeypatch.setattr(control, "advance_batch", advance_batch)
        assert batch.turn == how["owner"]
        control.handle_message(aws, deployment, json.dumps(drop_message(newer)), plenty)
        assert cloud.batch(batch.id).status is Status.CANCELLED
        advance_batch(aws, deployment, batch, *rest, **how)
        batch = cloud.batch(batch.id)
        assert (batch.status, batch.turn) == (Status.CANCELLED, None)

    monkeypatch.setattr(control, "advance_batch", advance_late)
    with listening(cloud.aws) as statuses:
        control.handle_message(cloud.aws, cloud.deployment, json.dumps(drop_message(older)), plenty)
    assert statuses == ["cancelling", "cancelled", "in_progress"]
    assert cloud.batch(newest(cloud, "input/x.jsonl") or "none").shards_rung == 3
    assert cloud.rung_shards() == [0, 1, 2]


def test_a_message_of_ours_brings_a_batch_forward(cloud: Cloud) -> None:
    """Any component of the cloud may send one."""
    batch = cloud.create(lines_of(5))
    assert handle(json.dumps(advance_message(batch.id))) == []
    assert cloud.batch(batch.id).status is Status.IN_PROGRESS


def test_a_malformed_message_does_not_come_again(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the test event is not a warning, an unknown batch is."""
    test_event = (EVENTS / "aws_test_event.json").read_text()
    unknown = json.dumps(advance_message("batch_unknown"))
    gone = message_of(cloud, "input/gone.jsonl")
    elsewhere = json.dumps(drop_message(Drop("elsewhere", "input/x.jsonl", "01")))
    with caplog.at_level(logging.INFO, logger="tidemill"):
        assert handle(test_event, "nonsense", unknown, gone, elsewhere) == []
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "message dropped"),
        ("WARNING", "message dropped"),
        ("WARNING", "no such batch"),
        ("WARNING", "upload gone"),
        ("WARNING", "upload ignored"),
    ]


@pytest.mark.parametrize("error", [AwsError("busy"), RuntimeError("a mistake of ours")])
def test_a_message_that_fails_comes_again_and_the_others_do_not(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The rest of the event is processed, whatever the failure."""

    def fail_for_bad(aws: Aws, deployment: Deployment, batch_id: str, time_left: Any) -> None:
        if batch_id == "batch_bad":
            raise error
        advance(aws, deployment, batch_id, time_left)

    monkeypatch.setattr(control, "advance", fail_for_bad)
    batch = cloud.create(lines_of(1))
    good, bad = (json.dumps(advance_message(name)) for name in (batch.id, "batch_bad"))
    assert handle(bad, good, bad) == ["0", "2"]
    assert handle(bad) == ["0"]
    assert cloud.batch(batch.id).status is Status.IN_PROGRESS


def fail(*_: Any) -> None:
    """Fail as where the table cannot be reached."""
    raise AwsError("busy")


def test_a_message_that_failed_is_seen_again_in_seconds(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel waits as long as the trouble lasts, not as long as the longest run may take."""
    queue = cloud.deployment.control
    cloud.messages()  # S3's test event is no longer there
    cloud.run(queue.send(advance_message("batch_any"), group=None))
    monkeypatch.setattr(control, "advance", fail)
    [message] = cloud.run(queue.receive(visibility_seconds=960))
    record = record_of(0, message.body) | {"receiptHandle": message.receipt}
    run = cast("LambdaContext", LocalLambdaContext("control", 600))
    control.handler({"Records": [record]}, run)
    [again] = cloud.run(queue.receive(visibility_seconds=960))
    assert again.body == message.body


def test_each_failure_hides_a_message_for_longer(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to five minutes, in the queue that it comes from: an outage of hours costs few tries."""
    hidden: list[int] = []
    queues = (cloud.deployment.control, cloud.deployment.drops)

    def note(queue: Queue, _message: Message, seconds: int) -> Operation[bool]:
        assert queue == queues[len(hidden) % 2]
        hidden.append(seconds)
        return True
        yield

    monkeypatch.setattr(control, "advance", fail)
    monkeypatch.setattr(Queue, "hide", note)
    for count in range(1, MAX_CONTROL_RECEIVES + 1):
        record = record_of(count, json.dumps(advance_message("batch_any")))
        record["attributes"]["ApproximateReceiveCount"] = str(count)
        record["eventSourceARN"] = f"arn:aws:sqs:us-east-1:0:{queues[(count - 1) % 2].name}"
        control.handler(
            {"Records": [record]}, cast("LambdaContext", LocalLambdaContext("control", 600))
        )
    assert hidden == [1, 2, 5, 15, 60, 120, *[300] * 9]


@pytest.mark.usefixtures("cloud")
def test_failures_are_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lambda counts such a run as a success: an alarm needs the metric."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "control")
    good, bad = (json.dumps(advance_message(name)) for name in ("batch_good", "batch_bad"))
    handle(good)
    assert lines_in(capsys.readouterr().out) == []
    monkeypatch.setattr(control, "advance", fail)
    handle(bad, good)
    lines = lines_in(capsys.readouterr().out)
    assert [line.figures for line in lines] == [{"MessagesFailed": 1}] * 2
    assert [line.labels for line in lines] == [{"message_id": f"message-{n}"} for n in (0, 1)]


@pytest.mark.usefixtures("cloud")
def test_a_run_knows_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is Lambda's remaining time, in seconds."""
    seen: list[float] = []

    def note(_aws: Aws, _deployment: Deployment, _batch_id: str, time_left: Any) -> None:
        seen.append(time_left())

    monkeypatch.setattr(control, "advance", note)
    assert handle(json.dumps(advance_message("batch_any"))) == []
    assert 0 < seen[0] <= 600
