"""Failures of intake: a batch whose runs fail repeatedly ends as `failed`, with the reason.

Failures of AWS services do not count: an outage is not the file's fault.
"""

from __future__ import annotations

from typing import Final

from tidemill.batch.model import Batch, BatchError
from tidemill.batch.states import Status
from tidemill.protocol.validation import printable

from ..aws.sync import Aws
from ..deployment import Deployment
from ..lifecycle.finish import end_batch
from ..observability import logger

MAX_FAILURES: Final = 3
_MAX_REASON_CHARS = 300


def is_ended_by_failure(
    aws: Aws, deployment: Deployment, batch: Batch, now: float, failure: Exception
) -> bool:
    """Count an exception of a run, which the message repeats; the third one ends the batch.

    The third is logged. Its caller suppresses it, so that the message is deleted.
    """
    if not _is_last(aws, deployment, batch):
        return False
    logger.exception("intake failed", batch_id=batch.id)
    words = f"{type(failure).__name__}: {failure}".removesuffix(": ")
    reason = printable(words[:_MAX_REASON_CHARS])
    message = f"The file could not be read in {MAX_FAILURES} attempts: {reason}"
    end_batch(
        aws,
        deployment,
        batch.id,
        Status.FAILED,
        int(now),
        errors=(*batch.errors, BatchError("internal_error", message)),
        num_errors=batch.num_errors + 1,
    )
    return True


def _is_last(aws: Aws, deployment: Deployment, batch: Batch) -> bool:
    """Count a failure of a batch that is validating, and return whether it is the last one."""
    latest = aws.run(deployment.table.get_batch(batch.id))
    if latest is None or latest.status is not Status.VALIDATING:
        return False
    failures = latest.failures + 1
    aws.run(deployment.table.change_batch(batch.id, Status.VALIDATING, failures=failures))
    return failures >= MAX_FAILURES
