"""Brings a batch forward: looks where it stands and does what comes next.

Every message about a batch ends here. Each step is done by whoever comes, any number of times, with
the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from handler.aws.items import dump
from handler.aws.sync import Aws
from handler.batch.fleet import Waiting
from handler.batch.model import Batch, BatchError
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.finalize.close import close_abandoned
from handler.finalize.finalize import finalize
from handler.fleet.waiting import why_waiting
from handler.intake.convert import give_up
from handler.intake.intake import take_in
from handler.intake.shards import ring_shards
from handler.log import logger
from handler.moves.announce import announce
from handler.moves.end import end_batch
from handler.outbound.webhook import tell


def advance(
    aws: Aws,
    deployment: Deployment,
    batch_id: str,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Bring a batch as far as it can come now.

    `time_left` gives the seconds until this run must have ended; what it does not allow is left to
    the next one, and a message for that is sent. An id that no batch has is logged and forgotten.
    """
    batch = aws.run(deployment.table.get_batch(batch_id))
    if batch is None:
        logger.warning("no such batch", batch_id=batch_id)
        return
    go_on(aws, deployment, batch, time_left, now=now)


def go_on(
    aws: Aws,
    deployment: Deployment,
    found: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Bring a batch that was just read or made as far as it can come now.

    Each step moves it by a conditional write, which says how the batch is then: a step goes by that
    instead of reading again what may have changed since `found`.
    """
    aws.run(announce(deployment, found))
    batch: Batch | None = found
    if found.status is Status.VALIDATING:
        batch = _validate(aws, deployment, found, time_left, now)
    if batch is not None and batch.status is Status.IN_PROGRESS:
        batch = _progress(aws, deployment, batch, time_left, now)
    if batch is not None and batch.status in {Status.FINALIZING, Status.CANCELLING}:
        finalize(aws, deployment, batch, time_left, now=now)
    elif batch is not None and batch.is_terminal:
        give_up(aws, deployment, batch)
        tell(aws, deployment, batch, time_left, now=now)


def _validate(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    now: Callable[[], float],
) -> Batch | None:
    if batch.expires_at <= now():
        return end_batch(aws, deployment, batch.id, Status.EXPIRED, int(now()))
    return take_in(aws, deployment, batch, time_left, now=now, is_patient=False)


def _progress(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    now: Callable[[], float],
) -> Batch | None:
    """Return the batch, finalizing if all its shards are done or its window has ended."""
    is_rung = batch.shards_rung >= batch.num_shards
    if is_rung and aws.run(deployment.table.count_left(batch)) == 0:
        return _wind_up(aws, deployment, batch, Status.COMPLETED, int(now()))
    if batch.expires_at <= now():
        return _wind_up(aws, deployment, batch, Status.EXPIRED, int(now()))
    if is_rung:
        close_abandoned(aws, deployment, batch, time_left, now)
    else:
        ring_shards(aws, deployment, batch, time_left)
    return batch


def _told(batch: Batch, why: Waiting | None) -> dict[str, Any]:
    """Return the fields that tell why lines of a batch had no worker at its end."""
    if why is None:
        return {}
    errors = (*batch.errors, BatchError(why.code, why.message))
    return {"errors": [dump(error) for error in errors], "num_errors": batch.num_errors + 1}


def _wind_up(
    aws: Aws, deployment: Deployment, batch: Batch, outcome: Status, now: int
) -> Batch | None:
    why = aws.run(why_waiting(deployment, batch, now)) if outcome is Status.EXPIRED else None
    move = deployment.table.move_batch(
        batch.id, Status.FINALIZING, now, outcome=str(outcome), **_told(batch, why)
    )
    moved = aws.run(move).batch
    if moved is not None:
        logger.info("batch winds up", batch_id=batch.id, status=str(moved.status))
        aws.run(announce(deployment, moved))
    return moved
