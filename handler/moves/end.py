"""The end of a batch: its report beside its output, its last status, and the word to the world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from handler.aws.calls import Operation
from handler.aws.items import dump
from handler.aws.sync import Aws
from handler.batch.keys import is_drop
from handler.batch.model import Batch, Progress
from handler.batch.states import MOVES, Status
from handler.batch.wire import to_wire
from handler.deployment import Deployment
from handler.log import logger
from handler.moves.announce import announce


def end(
    deployment: Deployment, batch_id: str, status: Status, now: int, **changes: Any
) -> Operation[Batch | None]:
    """Write the report, move the batch to a terminal status with `changes`, and announce it.

    `changes` are fields of Batch with their values. Returns the batch as it is then: repeated it
    changes nothing, and a status that does not lead to `status` stays. None when there is none.
    """
    table = deployment.table
    batch = yield from table.choose_end(batch_id, status, now)
    if batch is None:
        return None
    if status not in MOVES[batch.status]:
        if batch.is_terminal:
            yield from announce(deployment, batch)
        return batch
    # It may have been chosen by a run that died, or was overtaken, before what came since.
    ended_at = max(batch.ended_at or now, batch.winds_up_since or batch.in_progress_at or 0)
    ended = replace(batch.moved(status, ended_at), ended_at=ended_at, **changes)
    yield from _write_report(deployment, ended, ended_at)
    fields = dump(ended)
    # What the batch has become meanwhile may need another end, or none yet.
    moved = yield from table.move_batch(
        batch_id,
        status,
        ended_at,
        source=batch.status,
        **{name: fields[name] for name in changes},
    )
    if moved.batch is not None and moved.batch.is_terminal:
        if not moved.is_there:
            # Another end was quicker, and ours must not be the last word beside the output.
            yield from _write_report(deployment, moved.batch, moved.batch.ended_at or ended_at)
        logger.info("batch ended", batch_id=batch_id, status=str(moved.batch.status))
        yield from announce(deployment, moved.batch)
    return moved.batch


def end_batch(
    aws: Aws, deployment: Deployment, batch_id: str, status: Status, now: int, **changes: Any
) -> Batch | None:
    """Run `end`, for those who run their operations one by one."""
    return aws.run(end(deployment, batch_id, status, now, **changes))


def _write_report(deployment: Deployment, batch: Batch, ended_at: int) -> Operation[None]:
    """Write `batch.json`, unless a newer upload has made that key its own."""
    if is_drop(batch.outputs):
        newest = yield from deployment.table.newest_drop(batch.source.bucket, batch.outputs)
        if newest not in (None, batch.id):
            return
    progress = batch.final or Progress()
    price = deployment.settings.gpu_hour_price(batch.model)
    report = to_wire(batch, progress, now=ended_at, price_per_gpu_hour=price)
    body = to_json(report, indent=2) + b"\n"
    yield from deployment.bucket.put(batch.outputs.report_key, body, "application/json")
