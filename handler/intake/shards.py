"""Shards: recorded while the file is still being read, enqueued once it is valid."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from tidemill.batch.model import Batch, Shard
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

from ..aws.queues import advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..fleet.demand import open_work
from ..fleet.pause import record_pause
from ..fleet.scale import scale_for_batch
from ..lifecycle.batch_lock import RESERVE_SECONDS
from ..observability import logger

_NUM_THREADS = 4
_MAX_PENDING = 32
# Number of shards enqueued between two records of the progress.
_RING_AT_ONCE = 1000


class ShardWriter:
    """Calls `put` for each shard in threads; a context manager that waits for all calls.

    An exception of a call is raised by the next `write` that waits for it, or by `drain`.
    """

    def __init__(self, put: Callable[[Shard], None]) -> None:
        self._put = put
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="shards")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def write(self, shard: Shard) -> None:
        """Start to record a shard; waits while many are in progress."""
        self._pending.append(self._pool.submit(self._put, shard))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft().result()

    def drain(self) -> None:
        """Wait until every shard is recorded."""
        while self._pending:
            self._pending.popleft().result()


def record_shards(aws: Aws, deployment: Deployment, shards: Iterable[Shard]) -> None:
    """Record planned shards, several concurrently; shards that were begun are unchanged."""
    with ShardWriter(lambda shard: aws.run(deployment.table.put_shard(shard))) as writer:
        for shard in shards:
            writer.write(shard)
        writer.drain()


def enqueue_shards(
    aws: Aws, deployment: Deployment, batch: Batch, time_left: Callable[[], float]
) -> None:
    """Send messages for the shards that have none yet, and start a worker if none runs.

    The next run does the rest after the deadline. A pause is recorded before the first message is
    sent: an active worker would otherwise begin the shards. Two concurrent runs may send a message
    twice, which is harmless.
    """
    queue = deployment.work.get(batch.model or "")
    if queue is None:
        logger.error("model has no queue", batch_id=batch.id, model=batch.model)
        return
    rung, now = batch.shards_rung, int(time.time())
    pause = aws.run(deployment.limits.find_pause(batch.tenant, now))
    if pause is not None or batch.pause is not None:
        pause = aws.run(record_pause(deployment, batch, pause, now))
    starts_workers = pause is None and bool(deployment.settings.fleets)
    while rung < batch.num_shards:
        until = min(rung + _RING_AT_ONCE, batch.num_shards)
        aws.run(queue.send_shards(batch.id, range(rung, until), group=batch.tenant))
        if rung == batch.shards_rung and starts_workers:
            work = open_work(batch, Progress(), num_shards=batch.shards_left)
            aws.run(scale_for_batch(deployment, work, now))
        rung = until
        noted = deployment.table.change_batch(batch.id, Status.IN_PROGRESS, shards_rung=rung)
        if aws.run(noted) is None:
            logger.info("ringing stops", batch_id=batch.id, shards_rung=rung)
            return
        if rung < batch.num_shards and time_left() < RESERVE_SECONDS:
            aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
            return
    logger.info("shards enqueued", batch_id=batch.id, num_shards=batch.num_shards)
