"""A batch for clients: its item in the table, its shards' progress, and its cost."""

from __future__ import annotations

from tidemill.batch.batch_object import MAX_LISTED_ERRORS, BatchObject, batch_object
from tidemill.batch.file.throughput import TELLING_SHARE
from tidemill.batch.forecast import share_done
from tidemill.batch.model import Batch
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..deployment import Deployment
from ..fleet.waiting_reason import get_waiting_reason


def describe_batch(
    deployment: Deployment, batch: Batch, now: float, *, max_errors: int = MAX_LISTED_ERRORS
) -> Operation[BatchObject]:
    """Return the Batch object of a batch that was just read."""
    progress, has_worker = yield from _current_progress(deployment, batch, now)
    rate = None
    if batch.status is Status.IN_PROGRESS and share_done(batch, progress) < TELLING_SHARE:
        rate = yield from deployment.fleets.get_rate(batch.model or "")
    return batch_object(
        batch,
        progress,
        now=now,
        has_worker=has_worker,
        price_per_gpu_hour=deployment.settings.gpu_hour_price_of(batch, progress),
        waiting=(yield from get_waiting_reason(deployment, batch, now)),
        rate=rate,
        max_errors=max_errors,
    )


def progress_of(deployment: Deployment, batch: Batch, now: float) -> Operation[Progress]:
    """Return the progress of a batch; one that is still being read has no shards."""
    progress, _ = yield from _current_progress(deployment, batch, now)
    return progress


def _current_progress(
    deployment: Deployment, batch: Batch, now: float
) -> Operation[tuple[Progress, bool]]:
    """Return the progress of a batch, and whether a worker is running any of it."""
    if batch.final is not None:
        return batch.final, False
    if batch.status is Status.VALIDATING or batch.in_progress_at is None:
        return Progress(), False
    standing = yield from deployment.table.get_shard_progress(batch)
    return standing.progress(now), bool(standing.leased(now))
