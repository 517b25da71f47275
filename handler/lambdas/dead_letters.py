"""Dead-letter Lambda: handles messages that failed too often."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from ..aws.sync import Aws
from ..control.dead_letters import handle_dead_letter
from ..deployment import deployment
from ..observability import logger
from .messages import process_each

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Handle each message; return those to be retried."""
    return process_each(event, context, _handle)


def _handle(body: str) -> None:
    _aws().run(handle_dead_letter(deployment(), body, int(time.time())))
