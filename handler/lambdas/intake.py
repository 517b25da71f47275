"""The Lambda on the intake queue: units of the work with files that are taken in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.deployment import Deployment, deployment
from handler.intake.events import Intake, parse_control
from handler.intake.units import work_on
from handler.lambdas.messages import deal_with_each, show_again_soon
from handler.log import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Deal with the messages of an SQS event; return those that must come again."""

    def time_left() -> float:
        return context.get_remaining_time_in_millis() / 1000

    def deal_with(body: str) -> None:
        act_on(_aws(), deployment(), body, time_left)

    return deal_with_each(event, context, deal_with, _show_again_soon)


def _show_again_soon(record: SQSRecord) -> None:
    show_again_soon(_aws, lambda: deployment().intake, record)


def act_on(aws: Aws, deployment: Deployment, body: str, time_left: Callable[[], float]) -> None:
    """Do what one message asks for; one that is about no file is logged and dropped."""
    for request in parse_control(body):
        if isinstance(request, Intake):
            work_on(aws, deployment, request, time_left)
        else:
            logger.warning("message dropped", reason="it is for no intake")
