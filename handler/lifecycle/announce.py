"""Announces the status of a batch on the event bus, at least once per lasting status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.batch.model import Batch
from tidemill.batch.month import month_of, uses_of
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..aws.stores.table import active_name
from ..deployment import Deployment
from ..errors import AwsError
from ..observability import Metric, emit, logger

# A cancelled batch counts neither as a success nor as a failure.
_COUNTED: Final[Mapping[Status, Metric]] = {
    Status.COMPLETED: Metric.BATCHES_COMPLETED,
    Status.FAILED: Metric.BATCHES_FAILED,
    Status.EXPIRED: Metric.BATCHES_FAILED,
}


def announce(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Publish the status unless it was; a terminal batch then leaves the list of active ones.

    Its lines no longer count against its tenant's limit. It stays in the list while its webhook is
    pending. One of several publishers counts the end. A failing bus blocks no batch: the reaper
    announces the status later.
    """
    if batch.announced is not batch.status:
        try:
            yield from deployment.events.publish(_detail_of(batch))
        except AwsError as exc:
            logger.warning("status not announced", batch_id=batch.id, reason=str(exc))
            return
        counts = _counts_of(deployment, batch) if batch.is_terminal else []
        is_first = yield from deployment.table.note_announced(batch, counts)
        metric = _COUNTED.get(batch.status)
        if is_first and metric is not None:
            emit({metric: 1}, model=batch.model, batch_id=batch.id, status=str(batch.status))
        if is_first and batch.is_terminal:
            yield from _enqueue_webhook(deployment, batch)
    if batch.is_terminal:
        yield from deployment.usage.release_lines(batch)
        if batch.webhook_delivery != "pending":
            yield from deployment.table.forget_active(active_name(batch))


def _enqueue_webhook(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Queue the webhook call for the control Lambda; the reaper queues it again if it is lost."""
    if batch.webhook_delivery != "pending":
        return
    try:
        yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)
    except AwsError as exc:
        logger.warning("webhook message not sent", batch_id=batch.id, reason=str(exc))


def _counts_of(deployment: Deployment, batch: Batch) -> list[dict[str, Any]]:
    """Return the writes that add an ended batch to the sums of its tenant and of its month."""
    done = batch.final or Progress()
    uses = uses_of(batch, done, deployment.settings.gpu_hour_price)
    return deployment.ledger.counts_of_end(batch, done, uses, month_of(batch.end_at or 0))


def _detail_of(batch: Batch) -> dict[str, Any]:
    return {
        "batch_id": batch.id,
        "tenant": batch.tenant,
        "status": str(batch.status),
        "input": f"s3://{batch.input.bucket}/{batch.input.key}",
        "num_rows": batch.num_rows,
        "output_key": batch.outputs.output_key,
        "metadata": batch.options.metadata,
    }
