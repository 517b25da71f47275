"""The Lambda on the control queue: uploads, messages about batches, ends of workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from handler.aws.sync import Aws
from handler.batch.keys import DROP_TENANT
from handler.control.advance import advance, go_on
from handler.control.sweep import sweep
from handler.deployment import Deployment, deployment
from handler.fleet.ended import take_end
from handler.intake.create import take_drop
from handler.intake.events import (
    Advance,
    Drop,
    Ended,
    Ignored,
    Intake,
    Sweep,
    Uploaded,
    drop_message,
    parse_control,
)
from handler.intake.units import work_on
from handler.lambdas.messages import deal_in_time
from handler.log import logger

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Deal with the messages of an SQS event; return those that must come again."""

    def act(body: str, time_left: Callable[[], float]) -> None:
        act_on(_aws(), deployment(), body, time_left)

    return deal_in_time(event, context, act, _aws, lambda: deployment().control)


def act_on(aws: Aws, deployment: Deployment, body: str, time_left: Callable[[], float]) -> None:
    """Do what one message asks for; one that asks for nothing is logged and dropped."""
    for request in parse_control(body):
        match request:
            case Uploaded(drop):
                aws.run(deployment.control.send(drop_message(drop), group=DROP_TENANT))
            case Drop():
                batch = aws.run(take_drop(deployment, request, int(time.time())))
                if batch is not None:
                    go_on(aws, deployment, batch, time_left)
            case Sweep(after):
                aws.run(sweep(deployment, after, int(time.time()), time_left))
            case Advance():
                advance(aws, deployment, request.batch_id, time_left)
            case Intake():
                work_on(aws, deployment, request, time_left)
            case Ended(ended):
                aws.run(take_end(deployment, ended, int(time.time())))
            case Ignored():
                log = logger.info if request.is_expected else logger.warning
                log("message dropped", reason=request.reason)
