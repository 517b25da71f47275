"""Advances a batch: a state machine that does the next steps of its current status.

Every message about a batch ends here. Each step is idempotent: any run may do it, any number of
times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tidemill.batch.batch_object import is_over_cost
from tidemill.batch.model import MAX_COST_REACHED, Batch, BatchError
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.items import dump
from ..aws.queues import threshold_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..finalize.close import close_settled
from ..finalize.finalize import finalize
from ..finalize.webhook import send_webhook
from ..fleet.waiting_reason import get_waiting_reason
from ..intake.convert import abort_conversion
from ..intake.intake import ingest
from ..intake.shards import enqueue_shards
from ..lifecycle.announce import announce
from ..lifecycle.finish import end_batch
from ..observability import logger
from .erase import erase


def advance(
    aws: Aws,
    deployment: Deployment,
    batch_id: str,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Advance a batch as far as possible now.

    `time_left` returns the seconds until this run's deadline; a message leaves the rest to another
    run. An unknown ID is logged and dropped.
    """
    batch = aws.run(deployment.table.get_batch(batch_id))
    if batch is None:
        logger.warning("no such batch", batch_id=batch_id)
        return
    advance_batch(aws, deployment, batch, time_left, now=now)


def advance_batch(
    aws: Aws,
    deployment: Deployment,
    found: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    owner: str | None = None,
) -> None:
    """Advance a batch that was just read or created as far as possible now.

    Each step is a conditional write that returns the batch, so it is not read again. `owner` is the
    owner of the lock with which this run has created the batch.
    """
    batch: Batch | None = found
    # Intake announces `validating`, unless its first run finishes it.
    if found.status is Status.VALIDATING:
        batch = _validate(aws, deployment, found, time_left, now, owner=owner)
    else:
        aws.run(announce(deployment, found))
    if batch is not None and batch.status is Status.IN_PROGRESS:
        batch = _progress(aws, deployment, batch, time_left, now)
    if batch is not None and batch.status in {Status.FINALIZING, Status.CANCELLING}:
        finalize(aws, deployment, batch, time_left, now=now)
    elif batch is not None and batch.is_terminal:
        abort_conversion(aws, deployment, batch)
        if batch.erasing_at is None:
            send_webhook(aws, deployment, batch, time_left, now=now)
        else:
            erase(aws, deployment, batch, time_left, now=now)


def _validate(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    now: Callable[[], float],
    *,
    owner: str | None,
) -> Batch | None:
    if batch.expires_at <= now():
        return end_batch(aws, deployment, batch.id, Status.EXPIRED, int(now()))
    return ingest(aws, deployment, batch, time_left, now=now, is_patient=False, owner=owner)


def _progress(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    now: Callable[[], float],
) -> Batch | None:
    """Return the batch, finalizing if its shards, its window or its `max_cost` have ended."""
    is_rung = batch.shards_rung >= batch.num_shards
    if is_rung and aws.run(deployment.table.count_left(batch)) == 0:
        return _wind_up(aws, deployment, batch, Status.COMPLETED, int(now()))
    if batch.expires_at <= now():
        why = aws.run(get_waiting_reason(deployment, batch, now()))
        errors = () if why is None else (BatchError(why.code, why.message),)
        return _wind_up(aws, deployment, batch, Status.EXPIRED, int(now()), *errors)
    if (spent := _cost_error(aws, deployment, batch, now())) is not None:
        return _wind_up(aws, deployment, batch, Status.EXPIRED, int(now()), spent)
    if not is_rung:
        enqueue_shards(aws, deployment, batch, time_left)
    elif not aws.run(_requests_threshold(deployment, batch)):
        close_settled(aws, deployment, batch, time_left, now)
    return batch


def _requests_threshold(deployment: Deployment, batch: Batch) -> Operation[bool]:
    """Request a batch's threshold once all its rows are decided; return whether that is so.

    Its settled shards are closed afterwards, when more drafts may be final.
    """
    if not batch.awaits_threshold:
        return False
    progress = yield from deployment.table.get_shard_progress(batch)
    if not progress.are_decided(batch.shards_left):
        return False
    yield from deployment.intake.send(threshold_message(batch.id), group=batch.tenant)
    return True


def _cost_error(aws: Aws, deployment: Deployment, batch: Batch, now: float) -> BatchError | None:
    """Return the error of a batch that has reached its `max_cost`; None before."""
    if batch.options.max_cost is None:
        return None
    progress = aws.run(deployment.table.get_shard_progress(batch)).progress(now)
    price = deployment.settings.gpu_hour_price_of(batch, progress)
    if not is_over_cost(batch, progress, price):
        return None
    words = f"The GPU time of the batch has reached its `max_cost` of {batch.options.max_cost:,g}."
    return BatchError(MAX_COST_REACHED, f"{words} Finished rows are in the output.", "max_cost")


def _wind_up(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    outcome: Status,
    now: int,
    *errors: BatchError,
) -> Batch | None:
    changes: dict[str, Any] = {"outcome": str(outcome)}
    if errors:
        changes["errors"] = [dump(error) for error in (*batch.errors, *errors)]
        changes["num_errors"] = batch.num_errors + len(errors)
    move = deployment.table.move_batch(batch.id, Status.FINALIZING, now, **changes)
    moved = aws.run(move).batch
    if moved is not None:
        logger.info("batch is finishing", batch_id=batch.id, status=str(moved.status))
        aws.run(announce(deployment, moved))
    return moved
