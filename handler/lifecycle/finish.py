"""Ends a batch: writes its report, sets its terminal status, announces it; gives up shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from tidemill.batch.batch_object import batch_object
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import is_drop
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import MOVES, Status

from ..aws.calls import Operation
from ..aws.items import dump
from ..aws.sync import Aws
from ..deployment import Deployment
from ..observability import Metric, emit, logger
from .announce import announce


def end(
    deployment: Deployment, batch_id: str, status: Status, now: int, **changes: Any
) -> Operation[Batch | None]:
    """Write the report, move the batch to a terminal status with `changes`, and announce it.

    `changes` are fields of Batch with their values. Returns the current batch, or None if it does
    not exist. Idempotent; a status that does not lead to `status` is unchanged.
    """
    table = deployment.table
    batch = yield from table.choose_end(batch_id, status, now)
    if batch is None:
        return None
    if status not in MOVES[batch.status]:
        if batch.is_terminal:
            yield from announce(deployment, batch)
        return batch
    # An earlier run that died, or was overtaken, may have set an earlier time.
    ended_at = max(batch.ended_at or now, batch.winds_up_since or batch.in_progress_at or 0)
    ended = replace(batch.moved(status, ended_at), ended_at=ended_at, **changes)
    yield from _write_report(deployment, ended, ended_at)
    fields = dump(ended)
    # The batch may have changed in the meantime and need another end, or none yet.
    moved = yield from table.move_batch(
        batch_id,
        status,
        ended_at,
        source=batch.status,
        **{name: fields[name] for name in changes},
    )
    if moved.batch is not None and moved.batch.is_terminal:
        if not moved.is_there:
            # Another end was quicker: its report must replace ours.
            yield from _write_report(deployment, moved.batch, moved.batch.ended_at or ended_at)
        logger.info("batch ended", batch_id=batch_id, status=str(moved.batch.status))
        yield from announce(deployment, moved.batch)
    return moved.batch


def end_batch(
    aws: Aws, deployment: Deployment, batch_id: str, status: Status, now: int, **changes: Any
) -> Batch | None:
    """Run `end` with a driver."""
    return aws.run(end(deployment, batch_id, status, now, **changes))


def _write_report(deployment: Deployment, batch: Batch, ended_at: int) -> Operation[None]:
    """Write `batch.json`, unless the key belongs to a newer upload."""
    if is_drop(batch.outputs):
        newest = yield from deployment.table.newest_drop(batch.source.bucket, batch.outputs)
        if newest not in (None, batch.id):
            return
    progress = batch.final or Progress()
    price = deployment.settings.gpu_hour_price_of(batch, progress)
    report = batch_object(batch, progress, now=ended_at, price_per_gpu_hour=price)
    body = to_json(report, indent=2) + b"\n"
    yield from deployment.bucket.put(batch.outputs.report_key, body, "application/json")


def abandon(
    deployment: Deployment, batch_id: str, number: int, reason: str, *, model: str | None
) -> Operation[None]:
    """Give up a shard, once, with the reason that its rows and errors contain."""
    if (yield from deployment.table.abandon(batch_id, number, reason)):
        logger.error("shard given up", batch_id=batch_id, shard=number, reason=reason)
        emit({Metric.SHARDS_GIVEN_UP: 1}, model=model, batch_id=batch_id, shard=number)
