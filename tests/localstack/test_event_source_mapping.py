"""The stand-in for Lambda does with messages what event source mappings do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aws_lambda_powertools.utilities.data_classes import SQSEvent

from localstack.event_source_mapping import EventSourceMapping, Handler, LocalLambdaContext
from tests.emulators import MODEL, Emulator, count_messages

_DEADLINE_SECONDS = 120


@pytest.fixture(autouse=True)
def _environment(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator is where the pump looks, as in its own process."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)


@contextmanager
def pumping(url: str, handler: Handler) -> Iterator[None]:
    """EventSourceMapping a queue into a handler, in a thread."""
    stop = threading.Event()
    mapping = EventSourceMapping(url, "sorter", handler, lambda_seconds=60)
    thread = threading.Thread(target=mapping.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_handler_gets_the_event_that_lambda_gives(ministack: Emulator) -> None:
    """It has every field that Powertools reads; a handled message is gone."""
    runs: list[tuple[dict[str, Any], LocalLambdaContext]] = []
    sqs, url = ministack.client("sqs"), ministack.create().work[MODEL]
    sent = sqs.send_message(QueueUrl=url, MessageBody="hello")
    with pumping(url, lambda event, context: runs.append((event, context))):
        wait_for(lambda: bool(runs) and count_messages(sqs, url) == 0)
    [(event, context)] = runs
    [record] = SQSEvent(event).records
    assert (record.body, record.message_id) == ("hello", sent["MessageId"])
    assert record.md5_of_body == sent["MD5OfMessageBody"]
    assert record.attributes.approximate_receive_count == "1"
    assert int(record.attributes.sent_timestamp) > 0
    assert record.queue_url.endswith(url.rpartition("/")[2])
    assert (record.event_source, record.aws_region) == ("aws:sqs", "us-east-1")
    assert record.receipt_handle
    assert context.function_name == "sorter"


def test_a_message_comes_again_until_the_handler_is_content(ministack: Emulator) -> None:
    """It comes again after an exception, and when it is named among the failures."""
    counts: list[str] = []
    sqs, url = ministack.client("sqs"), ministack.create(work_visibility_seconds=1).work[MODEL]

    def handler(event: dict[str, Any], _context: LocalLambdaContext) -> dict[str, Any]:
        [record] = event["Records"]
        counts.append(record["attributes"]["ApproximateReceiveCount"])
        if len(counts) == 1:
            raise ValueError("not today")
        failed = [{"itemIdentifier": record["messageId"]}] if len(counts) == 2 else []
        return {"batchItemFailures": failed}

    sqs.send_message(QueueUrl=url, MessageBody="hello")
    with pumping(url, handler):
        wait_for(lambda: len(counts) >= 3 and count_messages(sqs, url) == 0)
    assert counts[:3] == ["1", "2", "3"]


def test_a_run_counts_its_time_down_to_nothing() -> None:
    """So tests of timeouts take only seconds."""
    now = time.monotonic()
    assert 0 < LocalLambdaContext("x", 60, started=now).get_remaining_time_in_millis() <= 60_000
    assert LocalLambdaContext("x", 60, started=now - 59).get_remaining_time_in_millis() <= 1_000
    assert LocalLambdaContext("x", 60, started=now - 61).get_remaining_time_in_millis() == 0
