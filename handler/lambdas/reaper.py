"""Reaper Lambda: checks all active batches every minute, and requests a daily sweep."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from ..aws.sync import Aws
from ..control.reaper import reap
from ..deployment import deployment
from ..intake.control_messages import sweep_message
from ..observability import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> None:  # noqa: ARG001 - Lambda's signature
    """Run the reaper, or request the daily sweep."""
    if event.get("sweep"):
        _aws().run(deployment().control.send(sweep_message(), group=None))
        return
    reap(_aws(), deployment(), int(time.time()))
