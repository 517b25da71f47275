"""The queue of dead letters: messages that were received again and again."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.control.bury import bury
from handler.deployment import deployment
from handler.lambdas.messages import deal_with_each
from handler.log import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Deal with each message; those that cannot be dealt with now come again."""
    return deal_with_each(event, context, _bury)


def _bury(body: str) -> None:
    _aws().run(bury(deployment(), body, int(time.time())))
