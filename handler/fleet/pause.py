"""Pause: holds back the batches of a tenant, or all, once the day's GPU hours are used up.

The batch's item records it: workers postpone messages of such a batch, no worker is started for
it, and clients read the reason. Running shards are finished.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.batch.model import Batch, Pause
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.items import dump
from ..deployment import Deployment
from ..observability import logger


def record_pause(
    deployment: Deployment, batch: Batch, pause: Pause | None, now: int
) -> Operation[Pause | None]:
    """Record the pause of a batch's tenant if it is new, and return it with its start time."""
    known = batch.pause_at(now)
    if pause is not None and known is not None and known.code == pause.code:
        pause = replace(pause, since=known.since)
    if pause != known:
        why = pause and pause.code
        logger.info("batch paused" if pause else "batch resumed", batch_id=batch.id, why=why)
        fields = None if pause is None else dump(pause)
        yield from deployment.table.change_batch(batch.id, Status.IN_PROGRESS, pause=fields)
    return pause
