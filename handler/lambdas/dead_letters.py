"""The queue of dead letters: messages that were received again and again."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    process_partial_response,
)
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.control.bury import bury
from handler.deployment import deployment
from handler.log import logger

_aws = cache(Aws)
_processor = BatchProcessor(event_type=EventType.SQS, raise_on_entire_batch_failure=False)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Deal with each message; those that cannot be dealt with now come again."""
    return process_partial_response(event, _bury, _processor, context)


def _bury(record: SQSRecord) -> None:
    try:
        _aws().run(bury(deployment(), record.body, int(time.time())))
    except Exception:
        logger.exception("dead message not dealt with", message_id=record.message_id)
        raise
