"""Finalizes a batch: close its shards, publish, have its table made, deliver, report, end.

Every step looks first at what is done, so a run may die anywhere, and a message may come twice: the
next run ends in the same state. A run whose time is over rings for the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.net.pinned_connection import Network

from ..aws.queues import advance_message, table_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..lifecycle.batch_lock import BatchLock, LockLost, Requeue
from ..lifecycle.finish import end_batch
from ..observability import logger
from .close import close_shards
from .deliver import deliver
from .publish import publish


def finalize(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    network: Network | None = None,
) -> None:
    """Bring a batch that is `finalizing` or `cancelling` as far as the time allows.

    `time_left` gives the seconds until the run must have ended. Returns when the batch is terminal,
    when a message is on its way that goes on with it, or when another run has it: that one rings.
    """
    lock = BatchLock(aws, deployment, batch, time_left, now)
    if not lock.acquire():
        logger.info("another run has the batch", batch_id=batch.id)
        return
    delay_seconds: float | None = None
    is_table_due = False
    try:
        is_table_due = not _go_on(lock, network)
    except Requeue as pause:
        delay_seconds = pause.delay_seconds
    except LockLost as exc:
        logger.info("another run has the batch now", batch_id=batch.id, reason=str(exc))
    finally:
        lock.release()
    # Only now: the receiver of the message must find the lock free.
    if delay_seconds is not None:
        message, tenant = advance_message(batch.id), batch.tenant
        aws.run(deployment.control.send(message, group=tenant, delay_seconds=delay_seconds))
    if is_table_due:
        aws.run(deployment.intake.send(table_message(batch.id), group=batch.tenant))


def _go_on(lock: BatchLock, network: Network | None) -> bool:
    """Bring the batch to its end; False where another Lambda has to make its table first."""
    batch = lock.batch
    if batch.status not in {Status.FINALIZING, Status.CANCELLING}:
        return True
    if batch.final is None:
        close_shards(lock)
        publish(lock)
    if lock.batch.is_table_due:
        return False
    deliver(lock, network)
    outcome = lock.batch.outcome or Status.COMPLETED
    status = Status.CANCELLED if batch.status is Status.CANCELLING else outcome
    lock.renew()
    end_batch(lock.aws, lock.deployment, batch.id, status, int(lock.now()))
    return True
