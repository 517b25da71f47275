"""Giving a shard up: its lines that have no row get one that says why."""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.deployment import Deployment
from handler.log import logger
from handler.metrics import Metric, emit


def abandon(
    deployment: Deployment, batch_id: str, number: int, reason: str, *, model: str | None
) -> Operation[None]:
    """Give up a shard that nobody has given up yet, with words that its rows and errors show."""
    if (yield from deployment.table.abandon(batch_id, number, reason)):
        logger.error("shard given up", batch_id=batch_id, shard=number, reason=reason)
        emit({Metric.SHARDS_GIVEN_UP: 1}, model=model, batch_id=batch_id, shard=number)
