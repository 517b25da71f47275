"""Doorbells: sent, delayed, received once at a time, kept, and taken off."""

from __future__ import annotations

import json
import time

import pytest

from tests.emulators import Emulator
from tests.handler.aws.conftest import Run
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import (
    Message,
    Queue,
    message_batches,
    parse_message,
    shard_message,
)
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError, NotThere


@pytest.fixture
def queue(emulator: Emulator) -> Queue:
    """A separate queue."""
    [url] = emulator.create().work.values()
    return Queue(url)


def receive(run: Run, queue: Queue, seconds: float = 0, **options: int) -> list[Message]:
    """Return the messages received within that many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = run(queue.receive(wait_seconds=1, **{"visibility_seconds": 30, **options}))
        if found or time.monotonic() >= deadline:
            return found


def test_a_message_is_received_by_one(run: Run, queue: Queue) -> None:
    """It is then hidden from others, and gone once deleted; a second deletion is not an error."""
    run(queue.send(shard_message("batch_1", 7), group="search"))
    [message] = receive(run, queue, 10)
    assert parse_message(message.body) == {"batch_id": "batch_1", "shard": 7}
    assert receive(run, queue) == []
    assert run(queue.count()) == 1
    run(queue.delete(message))
    run(queue.delete(message))
    assert run(queue.count()) == 0


def test_a_message_that_is_not_kept_comes_again(run: Run, queue: Queue) -> None:
    """With visibility 0 at once; kept, it stays hidden."""
    run(queue.send({"n": 1}, group=None))
    [message] = receive(run, queue, 10)
    assert run(queue.hide(message, 60)) is True
    assert receive(run, queue) == []
    assert run(queue.hide(message, 0)) is True
    [again] = receive(run, queue, 10)
    assert again.body == message.body


def test_a_message_has_its_tenant_as_group(run: Run, queue: Queue) -> None:
    """Messages are sent singly or ten at a time; those without a tenant are received as well."""
    run(queue.send({"n": 1}, group="search"))
    run(queue.send_all([{"n": 2}, {"n": 3}], group="ads"))
    run(queue.send({"n": 4}, group=None))
    found: list[Message] = []
    while len(found) < 4:
        found += receive(run, queue, 10, max_messages=10)
    groups = {json.loads(message.body)["n"]: message.group for message in found}
    assert groups == {1: "search", 2: "ads", 3: "ads", 4: None}


def test_a_message_that_has_gone_is_not_kept() -> None:
    """Its holder gets False, and continues. Emulators accept any receipt, so the reply is faked."""
    keeping = Queue("url").hide(Message("{}", "receipt"), 60)
    call = next(keeping)
    assert (call.method, call.arguments["VisibilityTimeout"]) == ("change_message_visibility", 60)
    with pytest.raises(StopIteration) as end:
        keeping.throw(NotThere("gone"))
    assert end.value.value is False


def test_what_is_refused_of_ten_is_sent_again() -> None:
    """Only the refused one is sent again, once; a second refusal is an error."""
    sending = Queue("url").send_all([{"n": 0}, {"n": 1}], group="search")
    first = next(sending)
    assert len(first.arguments["Entries"]) == 2
    refused = {"Failed": [{"Id": "1", "Code": "InternalError", "SenderFault": False}]}
    second = sending.send(refused)
    assert [entry["Id"] for entry in second.arguments["Entries"]] == ["1"]
    with pytest.raises(AwsError):
        sending.send(refused)


def test_many_messages_go_ten_at_a_time(run: Run, queue: Queue) -> None:
    """Every one of them arrives."""
    bodies = [shard_message("batch_1", number) for number in range(25)]
    groups = list(message_batches(bodies))
    assert [len(group) for group in groups] == [10, 10, 5]
    for group in groups:
        run(queue.send_all(group, group="search"))
    assert run(queue.count()) == 25
    found: list[object] = []
    while messages := receive(run, queue, max_messages=10):
        found += [parse_message(message.body) for message in messages]
    assert sorted(map(str, found)) == sorted(map(str, bodies))


def test_a_delayed_message_comes_later(run: Run, queue: Queue) -> None:
    """It comes soon, but not at once; a delay longer than SQS allows is cut to the maximum."""
    run(queue.send({"n": 1}, group="search", delay_seconds=1.2))
    run(queue.send({"n": 2}, group="search", delay_seconds=10**6))
    assert run(queue.receive(wait_seconds=0, visibility_seconds=30)) == []
    [message] = receive(run, queue, 15)
    assert parse_message(message.body) == {"n": 1}


def test_a_queue_that_is_not_there_is_an_error(run: Run, queue: Queue) -> None:
    """The operation raises AWS's error."""
    with pytest.raises(AwsError):
        run(Queue(f"{queue.url}-no-such").send({"n": 1}, group=None))


@pytest.mark.parametrize(
    "body",
    ["", "null", "[]", "7", "{", '"x"', "\ud800"]
    + [json.dumps({"batch_id": batch_id}) for batch_id in ("x" * 65, "é", 7, None)],
)
def test_a_malformed_message_is_refused(body: str) -> None:
    """Only a JSON object with a possible batch ID is a message."""
    assert parse_message(body) is None


def test_a_status_change_is_published(run: Run, deployment: Deployment) -> None:
    """The bus takes it; a bus that is not there is an error."""
    run(deployment.events.publish({"batch_id": "batch_1", "status": str(Status.FAILED)}))
