"""Waking the workers of a model, so that its first shards need not wait for a metric.

A queue that was idle for hours has no metrics, and they come back up to a quarter of an hour late.
"""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.log import logger


def wake(deployment: Deployment, model: str | None) -> Operation[None]:
    """See that a model which has work has a worker, or will; whatever fails is only logged."""
    service = deployment.services.get(model or "")
    if service is None:
        return
    try:
        is_woken = yield from service.wake()
    except AwsError as exc:
        logger.warning("worker not woken", model=model, ecs_service=service.path, reason=str(exc))
        return
    if is_woken:
        logger.info("worker woken", model=model, ecs_service=service.path)
