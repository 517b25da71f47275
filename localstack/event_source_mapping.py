"""Event source mappings on one machine: queues and a schedule invoke the real handlers.

    python -m localstack.event_source_mapping --dead-letters URL

It does what AWS's event source mappings do: a message is passed to the handler with SQS's
attributes, is deleted if the handler succeeds, and comes again otherwise.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from uuid import uuid4

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from tidemill.handler.observability import logger

Handler = Callable[[dict[str, Any], "LocalLambdaContext"], Any]


@dataclass(frozen=True, slots=True)
class LocalLambdaContext:
    """Lambda context of one run: its name, request ID and remaining time."""

    function_name: str
    seconds: float
    started: float = field(default_factory=time.monotonic)
    aws_request_id: str = field(default_factory=lambda: str(uuid4()))
    memory_limit_in_mb: int = 2048
    function_version: str = "$LATEST"

    @property
    def invoked_function_arn(self) -> str:
        """Return the name in the logs."""
        return f"arn:aws:lambda:us-east-1:000000000000:function:{self.function_name}"

    def get_remaining_time_in_millis(self) -> int:
        """Return the remaining time of the run."""
        return max(0, round((self.started + self.seconds - time.monotonic()) * 1000))


class EventSourceMapping:
    """Polls a queue and invokes a handler with each message, one at a time, until stopped."""

    def __init__(self, queue_url: str, name: str, handler: Handler, lambda_seconds: float) -> None:
        self._queue_url = queue_url
        self._name = name
        self._handler = handler
        self._lambda_seconds = lambda_seconds
        self._sqs: Any = boto3.client("sqs")

    def run(self, stop: threading.Event) -> None:
        """Receive and invoke until `stop` is set; an error of the queue is retried."""
        while not stop.is_set():
            try:
                for message in self._receive():
                    self._invoke(message)
            except (BotoCoreError, ClientError) as exc:
                logger.warning("queue could not be read", function=self._name, reason=str(exc))
                stop.wait(0.5)

    def _receive(self) -> list[dict[str, Any]]:
        response = self._sqs.receive_message(
            QueueUrl=self._queue_url,
            MaxNumberOfMessages=1,
            WaitTimeSeconds=1,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        messages: list[dict[str, Any]] = response.get("Messages", [])
        return messages

    def _invoke(self, message: dict[str, Any]) -> None:
        context = LocalLambdaContext(self._name, self._lambda_seconds)
        try:
            answer = self._handler({"Records": [_record(message, self._queue_url)]}, context)
        except Exception:  # noqa: BLE001 - as Lambda does: the message comes again
            logger.exception("handler failed", function=self._name)
            return
        failed = (answer or {}).get("batchItemFailures", [])
        if not any(item["itemIdentifier"] == message["MessageId"] for item in failed):
            self._sqs.delete_message(
                QueueUrl=self._queue_url, ReceiptHandle=message["ReceiptHandle"]
            )


def _record(message: dict[str, Any], queue_url: str) -> dict[str, Any]:
    name = queue_url.rsplit("/", 1)[-1]
    return {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": {
            "ApproximateReceiveCount": "1",
            "SentTimestamp": "0",
            "SenderId": "local",
            "ApproximateFirstReceiveTimestamp": "0",
            **message.get("Attributes", {}),
        },
        "messageAttributes": message.get("MessageAttributes", {}),
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": f"arn:aws:sqs:us-east-1:000000000000:{name}",
        "awsRegion": "us-east-1",
    }


def run_schedule(seconds: float, lambda_seconds: float, stop: threading.Event) -> None:
    """Call the reaper every few seconds, as an EventBridge schedule does every few minutes."""
    handler = _load_handler("reaper")
    while not stop.wait(seconds):
        try:
            handler({"source": "aws.scheduler"}, LocalLambdaContext("reaper", lambda_seconds))
        except Exception:  # noqa: BLE001 - as Lambda does: the next run comes
            logger.exception("handler failed", function="reaper")


def _load_handler(name: str) -> Handler:
    found: Handler = importlib.import_module(f"tidemill.handler.lambdas.{name}").handler
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Poll until SIGTERM or SIGINT; runs in progress are finished."""
    parser = argparse.ArgumentParser(description="Run the Lambda handlers on one machine.")
    parser.add_argument("--dead-letters", help="URL of the dead-letter queue")
    parser.add_argument("--control-runs", type=int, default=2, help="concurrent control runs")
    parser.add_argument("--intake-runs", type=int, default=2, help="concurrent intake runs")
    parser.add_argument("--reaper-seconds", type=float, default=10)
    parser.add_argument("--lambda-seconds", type=float, default=900, help="timeout of each run")
    parsed = parser.parse_args(arguments)
    stop = threading.Event()

    def receive(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    seconds = parsed.lambda_seconds
    control = os.environ["TIDEMILL_CONTROL_QUEUE"]
    mappings = [
        EventSourceMapping(control, "control", _load_handler("control"), seconds)
    ] * parsed.control_runs
    if drops := os.environ.get("TIDEMILL_DROPS_QUEUE"):
        mappings.append(EventSourceMapping(drops, "control", _load_handler("control"), seconds))
    if intake := os.environ.get("TIDEMILL_INTAKE_QUEUE"):
        mappings += [
            EventSourceMapping(intake, "intake", _load_handler("intake"), seconds)
        ] * parsed.intake_runs
    if parsed.dead_letters:
        mappings.append(
            EventSourceMapping(
                parsed.dead_letters, "dead_letters", _load_handler("dead_letters"), seconds
            )
        )
    threads = [threading.Thread(target=each.run, args=(stop,)) for each in mappings]
    threads.append(
        threading.Thread(target=run_schedule, args=(parsed.reaper_seconds, seconds, stop))
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
