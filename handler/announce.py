"""Tells the world of a batch's status, at least once for each that it stays in."""

from __future__ import annotations

from typing import Any

from handler.aws.calls import Operation
from handler.batch.model import Batch
from handler.errors import AwsError
from handler.log import logger
from handler.settings import Deployment


def announce(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Publish the status unless that is done; a terminal batch then leaves the active ones.

    A bus that fails holds no batch up: the reaper announces what is active and was not.
    """
    if batch.announced is not batch.status:
        try:
            yield from deployment.events.publish(_detail_of(batch))
        except AwsError as exc:
            logger.warning("status not announced", batch_id=batch.id, reason=str(exc))
            return
        yield from deployment.table.change_batch(
            batch.id, batch.status, announced=str(batch.status)
        )
    if batch.is_terminal:
        yield from deployment.table.forget_active(batch.id)


def _detail_of(batch: Batch) -> dict[str, Any]:
    return {
        "batch_id": batch.id,
        "tenant": batch.tenant,
        "status": str(batch.status),
        "input": f"s3://{batch.source.bucket}/{batch.source.key}",
        "num_rows": batch.num_rows,
        "output_key": batch.outputs.output_key,
        "metadata": batch.options.metadata,
    }
