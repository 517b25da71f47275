"""Processes the messages of a queue one by one: a failed one is counted and retried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from ..aws.queues import Message, Queue, retry_seconds
from ..aws.sync import Aws
from ..errors import AwsError
from ..observability import Metric, emit, logger

_processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)


def process_in_time(
    event: dict[str, Any],
    context: LambdaContext,
    handle_message: Callable[[str, Callable[[], float]], None],
    aws: Callable[[], Aws],
    queues: Callable[[], Sequence[Queue]],
) -> Mapping[str, Any]:
    """Process each message of one of the queues by `handle(body, time_left)`.

    The visibility timeout of a failed message is shortened to seconds, with backoff. If SQS cannot
    be reached either, it lasts as long as the longest run.
    """

    def time_left() -> float:
        return context.get_remaining_time_in_millis() / 1000

    def shorten_visibility(record: SQSRecord) -> None:
        seconds = retry_seconds(int(record.attributes.approximate_receive_count))
        message = Message(record.body, record.receipt_handle)
        try:
            aws().run(_source_of(record, queues()).hide(message, seconds))
        except AwsError as exc:
            logger.warning(
                "visibility timeout not changed", message_id=record.message_id, reason=str(exc)
            )

    return process_each(
        event, context, lambda body: handle_message(body, time_left), shorten_visibility
    )


def _source_of(record: SQSRecord, queues: Sequence[Queue]) -> Queue:
    """Return the queue that a message comes from."""
    name = record.event_source_arn.rpartition(":")[2]
    return next((queue for queue in queues if queue.name == name), queues[0])


def process_each(
    event: dict[str, Any],
    context: LambdaContext,
    deal_with: Callable[[str], None],
    after_failure: Callable[[SQSRecord], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Process the body of each message of an SQS event; return those to be retried.

    Lambda counts such a run as a success, so each failure is emitted as a metric. `after_failure`
    may change the visibility timeout of the message.
    """

    def count_failure(record: SQSRecord) -> None:
        try:
            deal_with(record.body)
        except Exception as exc:
            if isinstance(exc, AwsError):
                reason = str(exc)
                logger.warning(
                    "message will be retried", message_id=record.message_id, reason=reason
                )
            else:
                logger.exception("message failed", message_id=record.message_id)
            emit({Metric.MESSAGES_FAILED: 1}, model=None, message_id=record.message_id)
            after_failure(record)
            raise

    return process_partial_response(event, count_failure, _processor, context)
