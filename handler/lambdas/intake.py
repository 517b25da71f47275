"""The Lambda on the intake queue: units of the work with files that are taken in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.deployment import Deployment, deployment
from handler.intake.events import Intake, parse_control
from handler.intake.units import work_on
from handler.lambdas.messages import deal_in_time
from handler.log import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Deal with the messages of an SQS event; return those that must come again."""

    def act(body: str, time_left: Callable[[], float]) -> None:
        act_on(_aws(), deployment(), body, time_left)

    return deal_in_time(event, context, act, _aws, lambda: deployment().intake)


def act_on(aws: Aws, deployment: Deployment, body: str, time_left: Callable[[], float]) -> None:
    """Do what one message asks for; one that is about no file is logged and dropped."""
    for request in parse_control(body):
        if isinstance(request, Intake):
            work_on(aws, deployment, request, time_left)
        else:
            logger.warning("message dropped", reason="it is for no intake")
