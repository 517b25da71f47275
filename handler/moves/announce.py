"""Tells the world of a batch's status, at least once for each that it stays in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from handler.aws.calls import Operation
from handler.aws.queues import advance_message
from handler.aws.stores.table import active_name
from handler.batch.model import Batch, Progress
from handler.batch.states import Status
from handler.batch.wire import cost_of
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.log import logger
from handler.metrics import Metric, emit

# A batch that was cancelled is nobody's success or failure.
_COUNTED: Final[Mapping[Status, Metric]] = {
    Status.COMPLETED: Metric.BATCHES_COMPLETED,
    Status.FAILED: Metric.BATCHES_FAILED,
    Status.EXPIRED: Metric.BATCHES_FAILED,
}


def announce(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Publish the status unless that is done; a terminal batch then leaves the active ones.

    Its lines then count no longer against its tenant's limit; while its webhook has not been told
    it stays. Of those who publish an end, at most one counts it. A bus that fails holds no batch
    up: the reaper announces what is active and was not.
    """
    if batch.announced is not batch.status:
        try:
            yield from deployment.events.publish(_detail_of(batch))
        except AwsError as exc:
            logger.warning("status not announced", batch_id=batch.id, reason=str(exc))
            return
        is_first = yield from deployment.table.note_announced(batch)
        metric = _COUNTED.get(batch.status)
        if is_first and metric is not None:
            emit({metric: 1}, model=batch.model, batch_id=batch.id, status=str(batch.status))
        if is_first and batch.is_terminal:
            yield from _ring_for_webhook(deployment, batch)
            yield from _add_to_total(deployment, batch)
    if batch.is_terminal:
        yield from deployment.usage.give_lines(batch)
        if batch.webhook_delivery != "pending":
            yield from deployment.table.forget_active(active_name(batch))


def _ring_for_webhook(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Let the control Lambda tell the webhook, wherever the batch ended; the reaper rings again."""
    if batch.webhook_delivery != "pending":
        return
    try:
        yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)
    except AwsError as exc:
        logger.warning("not rung for the webhook", batch_id=batch.id, reason=str(exc))


def _add_to_total(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Count a batch among what its tenant has had done; it is for people, and holds nothing up."""
    done = batch.final or Progress()
    price = deployment.settings.gpu_hour_price(batch.model)
    try:
        yield from deployment.ledger.add_total(batch, done, cost_of(done, price))
    except AwsError as exc:
        logger.warning("batch not added to the total", batch_id=batch.id, reason=str(exc))


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
