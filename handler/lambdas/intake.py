"""Intake Lambda: handles the work units of files, reads gold rows, and writes tables of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from ..aws.sync import Aws
from ..deployment import Deployment, deployment
from ..finalize.table import make_table
from ..intake.control_messages import IntakeStep, TableStep, ThresholdStep, parse_control
from ..intake.work_units import run_unit
from ..observability import logger
from .messages import process_in_time

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Handle the messages of an SQS event; return those to be retried."""

    def act(body: str, time_left: Callable[[], float]) -> None:
        handle_message(_aws(), deployment(), body, time_left)

    return process_in_time(event, context, act, _aws, lambda: (deployment().intake,))


def handle_message(
    aws: Aws, deployment: Deployment, body: str, time_left: Callable[[], float]
) -> None:
    """Handle one message; one that is not about a file is logged and dropped."""
    for request in parse_control(body):
        if isinstance(request, IntakeStep):
            run_unit(aws, deployment, request, time_left)
        elif isinstance(request, TableStep):
            make_table(aws, deployment, request.batch_id, time_left)
        elif isinstance(request, ThresholdStep):
            from ..intake.threshold import learn_threshold  # late: few batches learn one

            learn_threshold(aws, deployment, request.batch_id, time_left)
        else:
            logger.warning("message dropped", reason="not a message for intake")
