"""A batch as clients see it now: what the table says of it, its shards' progress, and its cost."""

from __future__ import annotations

from handler.aws.calls import Operation
from handler.batch.model import Batch, Progress
from handler.batch.states import Status
from handler.batch.wire import MAX_LISTED_ERRORS, BatchObject, to_wire
from handler.deployment import Deployment
from handler.fleet.waiting import why_waiting


def describe(
    deployment: Deployment, batch: Batch, now: float, *, max_errors: int = MAX_LISTED_ERRORS
) -> Operation[BatchObject]:
    """Return the Batch object of a batch that was just read."""
    progress, has_worker = yield from _stand(deployment, batch, now)
    return to_wire(
        batch,
        progress,
        now=now,
        has_worker=has_worker,
        price_per_gpu_hour=deployment.settings.gpu_hour_price(batch.model),
        waiting=(yield from why_waiting(deployment, batch, now)),
        max_errors=max_errors,
    )


def progress_of(deployment: Deployment, batch: Batch, now: float) -> Operation[Progress]:
    """Return how far a batch is; one that is still being read has no shards."""
    progress, _ = yield from _stand(deployment, batch, now)
    return progress


def _stand(deployment: Deployment, batch: Batch, now: float) -> Operation[tuple[Progress, bool]]:
    """Return how far a batch is, and whether a worker has any of it now."""
    if batch.final is not None:
        return batch.final, False
    if batch.status is Status.VALIDATING or batch.in_progress_at is None:
        return Progress(), False
    standing = yield from deployment.table.stand(batch)
    return standing.progress(now), bool(standing.leased(now))
