"""Messages of a queue, each dealt with by itself: one that fails is counted and comes again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.queues import Message, Queue, again_seconds
from handler.aws.sync import Aws
from handler.errors import AwsError
from handler.log import logger
from handler.metrics import Metric, emit

_processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)


def deal_in_time(
    event: dict[str, Any],
    context: LambdaContext,
    act_on: Callable[[str, Callable[[], float]], None],
    aws: Callable[[], Aws],
    queue: Callable[[], Queue],
) -> Mapping[str, Any]:
    """Deal with each message of a queue by `act_on`, which is told how to ask what time is left.

    One that failed is seen again in seconds: others wait as long as the longest run. That is when
    it comes where SQS, too, cannot be reached.
    """

    def time_left() -> float:
        return context.get_remaining_time_in_millis() / 1000

    def show_again_soon(record: SQSRecord) -> None:
        seconds = again_seconds(int(record.attributes.approximate_receive_count))
        message = Message(record.body, record.receipt_handle)
        try:
            aws().run(queue().hide(message, seconds))
        except AwsError as exc:
            logger.warning("message stays hidden", message_id=record.message_id, reason=str(exc))

    return deal_with_each(event, context, lambda body: act_on(body, time_left), show_again_soon)


def deal_with_each(
    event: dict[str, Any],
    context: LambdaContext,
    deal_with: Callable[[str], None],
    after_failure: Callable[[SQSRecord], None] = lambda _: None,
) -> Mapping[str, Any]:
    """Hand on the body of each message of an SQS event; return those that must come again.

    For Lambda such a run is a success, so that each failure is told as a figure. `after_failure`
    may say when the message comes again, which is else when its visibility ends.
    """

    def count_failure(record: SQSRecord) -> None:
        try:
            deal_with(record.body)
        except Exception as exc:
            if isinstance(exc, AwsError):
                reason = str(exc)
                logger.warning(
                    "message must come again", message_id=record.message_id, reason=reason
                )
            else:
                logger.exception("message not dealt with", message_id=record.message_id)
            emit({Metric.MESSAGES_FAILED: 1}, model=None, message_id=record.message_id)
            after_failure(record)
            raise

    return process_partial_response(event, count_failure, _processor, context)
