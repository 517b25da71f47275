"""Control Lambda: handles uploads from one queue; batches and worker events from another."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any
from uuid import uuid4

from aws_lambda_powertools.utilities.typing import LambdaContext

from ..aws.queues import Queue
from ..aws.sync import Aws
from ..control.advance import advance, advance_batch
from ..control.sweep import sweep
from ..deployment import Deployment, deployment
from ..fleet.worker_ended import handle_worker_event
from ..intake.control_messages import (
    Advance,
    Drop,
    Ignored,
    IntakeStep,
    Sweep,
    UploadEvent,
    WorkerEvent,
    drop_message,
    parse_control,
)
from ..intake.new_batch import create_batch_of_drop
from ..intake.work_units import run_unit
from ..observability import logger
from .messages import process_in_time

_aws = cache(Aws)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    """Handle the messages of an SQS event; return those to be retried."""

    def act(body: str, time_left: Callable[[], float]) -> None:
        handle_message(_aws(), deployment(), body, time_left)

    return process_in_time(event, context, act, _aws, _queues)


def _queues() -> tuple[Queue, ...]:
    return deployment().control, deployment().drops


def handle_message(
    aws: Aws, deployment: Deployment, body: str, time_left: Callable[[], float]
) -> None:
    """Handle one message; one that requests nothing is logged and dropped."""
    for request in parse_control(body):
        match request:
            case UploadEvent(drop):
                group = deployment.settings.tenant_of_drop(drop.key)
                aws.run(deployment.drops.send(drop_message(drop), group=group))
            case Drop():
                owner = uuid4().hex
                made = create_batch_of_drop(deployment, request, int(time.time()), owner)
                batch = aws.run(made)
                if batch is not None:
                    advance_batch(aws, deployment, batch, time_left, owner=owner)
            case Sweep(after):
                aws.run(sweep(deployment, after, int(time.time()), time_left))
            case Advance():
                advance(aws, deployment, request.batch_id, time_left)
            case IntakeStep():
                run_unit(aws, deployment, request, time_left)
            case WorkerEvent(ended):
                aws.run(handle_worker_event(deployment, ended, int(time.time())))
            case Ignored():
                log = logger.info if request.is_expected else logger.warning
                log("message dropped", reason=request.reason)
