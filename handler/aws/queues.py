"""Operations on the queues. A message only announces work: a lost or repeated one is harmless."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from ..errors import AwsError, NotThere
from .calls import Call, Operation

_MAX_ENTRIES = 10
MAX_DELAY_SECONDS = 900
# Backoff of a failed message, by its number of receives; the last value applies from then on.
_RETRY_SECONDS = (1, 2, 5, 15, 60, 120, 300)
# The longest run of a Lambda function that reads a queue.
LAMBDA_SECONDS = 900
# Receives of a message to the control Lambda before it is a dead letter: three quarters of an
# hour of reported failures, or four hours of crashing runs.
MAX_CONTROL_RECEIVES = 15
_SENT, _GROUP = "SentTimestamp", "MessageGroupId"
_COUNTS = [
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
]


class Message(NamedTuple):
    """A received message: `receipt` identifies it until its visibility timeout.

    `sent_at` is Unix seconds, None if the queue does not give it; `group` is the tenant of the
    message, None if it has none.
    """

    body: str
    receipt: str
    sent_at: float | None = None
    group: str | None = None


_MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Queue:
    """Creates operations on one SQS queue."""

    url: str

    @property
    def name(self) -> str:
        """Return the queue's name, the last part of its url and of its ARN."""
        return self.url.rpartition("/")[2]

    def send(
        self, body: dict[str, object], *, group: str | None, delay_seconds: float = 0
    ) -> Operation[None]:
        """Send one message, visible after a delay of at most 15 minutes.

        `group` is the message's tenant, or None: messages of one tenant do not delay those of
        others (fair queues).
        """
        arguments: dict[str, Any] = {
            "QueueUrl": self.url,
            "MessageBody": _text(body),
            **_of_group(group),
        }
        if delay_seconds > 0:
            arguments["DelaySeconds"] = min(MAX_DELAY_SECONDS, max(1, round(delay_seconds)))
        yield Call("sqs", "send_message", arguments)

    def send_all(
        self, bodies: Sequence[dict[str, object]], *, group: str | None
    ) -> Operation[None]:
        """Send at most ten messages of a group at once; AwsError if one is refused twice."""
        entries = [
            {"Id": str(number), "MessageBody": _text(body), **_of_group(group)}
            for number, body in enumerate(bodies)
        ]
        for is_last in (False, True):
            response = yield Call(
                "sqs", "send_message_batch", {"QueueUrl": self.url, "Entries": entries}
            )
            failed = {entry["Id"] for entry in response.get("Failed", ())}
            entries = [entry for entry in entries if entry["Id"] in failed]
            if not entries:
                return
            if is_last:
                raise AwsError(f"sqs send_message_batch: {response['Failed'][0]}")

    def send_shards(
        self,
        batch_id: str,
        numbers: Iterable[int],
        *,
        group: str | None,
        is_escalated: bool = False,
    ) -> Operation[None]:
        """Send the messages of shards."""
        for messages in message_batches(
            shard_message(batch_id, number, is_escalated=is_escalated) for number in numbers
        ):
            yield from self.send_all(messages, group=group)

    def receive(
        self, *, max_messages: int = 1, wait_seconds: int = 20, visibility_seconds: int
    ) -> Operation[list[Message]]:
        """Return at most `max_messages`, hidden from other receivers for a while."""
        response = yield Call(
            "sqs",
            "receive_message",
            {
                "QueueUrl": self.url,
                "MaxNumberOfMessages": min(_MAX_ENTRIES, max_messages),
                "WaitTimeSeconds": wait_seconds,
                "VisibilityTimeout": visibility_seconds,
                "MessageSystemAttributeNames": [_SENT, _GROUP],
            },
        )
        return [
            Message(
                message["Body"],
                message["ReceiptHandle"],
                _sent_at(message),
                message.get("Attributes", {}).get(_GROUP),
            )
            for message in response.get("Messages", ())
        ]

    def count(self) -> Operation[int]:
        """Return the approximate number of messages: waiting, delayed or in flight."""
        response = yield Call(
            "sqs", "get_queue_attributes", {"QueueUrl": self.url, "AttributeNames": _COUNTS}
        )
        return sum(int(response["Attributes"].get(name, 0)) for name in _COUNTS)

    def hide(self, message: Message, seconds: int) -> Operation[bool]:
        """Hide a message for that many seconds from now; False if it is no longer ours."""
        try:
            yield Call(
                "sqs",
                "change_message_visibility",
                {
                    "QueueUrl": self.url,
                    "ReceiptHandle": message.receipt,
                    "VisibilityTimeout": seconds,
                },
            )
        except NotThere:
            return False
        return True

    def delete(self, message: Message) -> Operation[None]:
        """Delete a message from the queue; a message that is already gone is not an error."""
        try:
            yield Call(
                "sqs",
                "delete_message",
                {"QueueUrl": self.url, "ReceiptHandle": message.receipt},
            )
        except NotThere:
            return


def retry_seconds(num_receives: int) -> int:
    """Return the backoff of a failed message, by its number of receives.

    A short failure is retried within moments, and an outage of hours costs few tries.
    """
    return _RETRY_SECONDS[max(1, min(num_receives, len(_RETRY_SECONDS))) - 1]


def _of_group(group: str | None) -> dict[str, str]:
    return {} if group is None else {_GROUP: group}


def _sent_at(message: Mapping[str, Any]) -> float | None:
    milliseconds = message.get("Attributes", {}).get(_SENT)
    return None if milliseconds is None else int(milliseconds) / 1000


def shard_message(batch_id: str, shard: int, *, is_escalated: bool = False) -> dict[str, object]:
    """Return the message that announces a shard to the workers of its model.

    An escalated shard has another key, so that workers of an earlier version ignore it.
    """
    return {"batch_id": batch_id, "escalated_shard" if is_escalated else "shard": shard}


def advance_message(batch_id: str) -> dict[str, object]:
    """Return the message that requests a batch's next step."""
    return {"kind": "advance", "batch_id": batch_id}


def intake_message(batch_id: str, unit: str = "") -> dict[str, object]:
    """Return the message for a unit of a batch's intake, or for the next phase."""
    return {"kind": "intake", "batch_id": batch_id, "unit": unit}


def threshold_message(batch_id: str) -> dict[str, object]:
    """Return the message that requests the threshold of a batch's cascade."""
    return {"kind": "threshold", "batch_id": batch_id}


def table_message(batch_id: str) -> dict[str, object]:
    """Return the message that requests the table of a batch's rows."""
    return {"kind": "table", "batch_id": batch_id}


def parse_message(body: str) -> dict[str, Any] | None:
    """Return a message's fields, or None if it is not a JSON object.

    A message with an impossible batch ID is rejected too: the table's keys have a maximum length.
    """
    try:
        fields = from_json(body)
    except (ValueError, TypeError):  # the second for a lone surrogate
        return None
    if not isinstance(fields, dict):
        return None
    batch_id = fields.get("batch_id", "")
    is_ours = isinstance(batch_id, str) and batch_id.isascii() and len(batch_id) <= _MAX_ID_CHARS
    return fields if is_ours else None


def _text(body: dict[str, object]) -> str:
    """Return a message as ASCII JSON: a key may contain characters that SQS refuses."""
    return to_json(body, ensure_ascii=True).decode()


def message_batches(bodies: Iterable[dict[str, object]]) -> Iterable[list[dict[str, object]]]:
    """Yield the messages ten at a time, which is SQS's maximum."""
    batch: list[dict[str, object]] = []
    for body in bodies:
        batch.append(body)
        if len(batch) == _MAX_ENTRIES:
            yield batch
            batch = []
    if batch:
        yield batch
