"""The schedules: all active batches are looked at every minute, the bucket once a day."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.control.reap import reap
from handler.deployment import deployment
from handler.intake.events import sweep_message
from handler.log import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> None:  # noqa: ARG001 - Lambda's form
    """Mend what is amiss with any batch, or ask for the sweep of a day."""
    if event.get("sweep"):
        _aws().run(deployment().control.send(sweep_message(), group=None))
        return
    reap(_aws(), deployment(), int(time.time()))
