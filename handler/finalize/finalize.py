"""Finalizes a batch: close its shards, publish, write its table, deliver, report, end.

Every step first checks what is done, so a run may die anywhere, and a message may come twice: the
next run ends in the same state. A run that reaches its deadline sends a message for the next one.
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
    """Advance a batch that is `finalizing` or `cancelling` as far as possible.

    `time_left` returns the seconds until the run's deadline. Returns when the batch is terminal,
    when a message for the rest is sent, or when another run has the batch, which then sends one.
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
    # Released first: the receiver of the message must find the lock free.
    if delay_seconds is not None:
        message, tenant = advance_message(batch.id), batch.tenant
        aws.run(deployment.control.send(message, group=tenant, delay_seconds=delay_seconds))
    if is_table_due:
        aws.run(deployment.intake.send(table_message(batch.id), group=batch.tenant))


def _go_on(lock: BatchLock, network: Network | None) -> bool:
    """Bring the batch to its end; False if another Lambda has to write its table first."""
    batch = lock.batch
    if batch.status not in {Status.FINALIZING, Status.CANCELLING}:
        return True
    if batch.final is None:
        close_shards(lock)
        publish(lock)
    if lock.batch.is_table_due or lock.batch.is_merge_due:
        return False
    deliver(lock, network)
    outcome = lock.batch.outcome or Status.COMPLETED
    status = Status.CANCELLED if batch.status is Status.CANCELLING else outcome
    lock.renew()
    end_batch(lock.aws, lock.deployment, batch.id, status, int(lock.now()))
    return True
