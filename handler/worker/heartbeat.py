"""Heartbeat of a worker: renews leases and visibility timeouts, and checks for ended batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn

from tidemill.batch.model import Batch
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

from ..errors import AwsError, LeaseLost
from ..observability import logger
from .context.context import WorkerContext
from .gpu_time import GpuTime
from .prefetch import Prefetch
from .shard.shard_run import EarlyEnd, ShardRun

_FINISH_SECONDS = 2.0


class Heartbeat:
    """Beats every `tick_seconds`.

    Each duty runs in a separate task within a beat, and a slow one is not started twice, so that it
    does not block the others.
    """

    def __init__(
        self,
        context: WorkerContext,
        runs: Sequence[ShardRun],
        gpu_time: GpuTime,
        prefetch: Prefetch,
    ) -> None:
        self._context = context
        self._runs = runs
        self._gpu_time = gpu_time
        self._prefetch = prefetch
        self._going: dict[object, asyncio.Task[None]] = {}
        self._reported: dict[ShardRun, object] = {}

    async def run(self) -> NoReturn:
        """Beat until cancelled; duties in progress then have a moment to finish.

        A write of sums that is cut off would be lost, or written twice.
        """
        try:
            while True:
                self.beat()
                await asyncio.sleep(self._context.config.tick_seconds)
        finally:
            if self._going:
                _, late = await asyncio.wait(self._going.values(), timeout=_FINISH_SECONDS)
                for task in late:
                    task.cancel()

    def beat(self) -> None:
        """Start the duties that are due."""
        self._gpu_time.share()
        runs = [run for run in self._runs if not run.is_over]
        self._reported = {run: summary for run, summary in self._reported.items() if run in runs}
        for run in runs:
            if run.lease.is_over:
                run.lose()
            elif run.lease.is_due or self._reported.get(run) != _summary_of(run.meter.progress):
                self.start(("lease", run), partial(self._renew, run))
            self.start(("message", run), run.message.extend_visibility)
        for batch_id in {run.shard.batch_id for run in runs}:
            self.start(("batch", batch_id), partial(self._check_batch, batch_id))
        if self._prefetch.is_due(self._context.clock()):
            self.start("prefetch", self._prefetch.update)
        if self._context.history.is_due(self._context.clock()):
            self.start("history", self._context.write_history, to_its_end=True)
        if self._context.gpu_usage.is_due(self._context.clock()):
            self.start("GPU usage", self._context.write_gpu_usage, to_its_end=True)
        if self._context.rate_meter.is_due(self._context.clock()):
            self.start("rate", self._context.write_rate)
        if self._context.usage_meter.is_due(self._context.clock()):
            self._context.emit(self._context.usage_meter.collect())

    def start(
        self,
        what: object,
        make: Callable[[], Coroutine[Any, Any, None]],
        *,
        to_its_end: bool = False,
    ) -> None:
        """Start a duty, unless it is still running; a duty that adds sums is not cut off."""
        if what in self._going:
            return
        seconds = None if to_its_end else self._context.config.lease_seconds / 3
        task = self._going[what] = asyncio.create_task(self._try(make(), seconds))
        task.add_done_callback(lambda _: self._going.pop(what))

    async def _try(self, doing: Coroutine[Any, Any, None], seconds: float | None) -> None:
        """Run one duty; on a failure or timeout the next beat retries it."""
        try:
            async with asyncio.timeout(seconds):
                await doing
        except (AwsError, TimeoutError) as exc:
            logger.warning("heartbeat failed", reason=repr(exc))
        except Exception:  # noqa: BLE001 - an error in one duty must not stop the others
            logger.exception("heartbeat failed")

    async def _renew(self, run: ShardRun) -> None:
        sent_at = self._context.clock()
        progress = run.meter.progress
        try:
            await self._context.aws.run(
                self._context.deployment.table.renew(
                    run.shard,
                    lease_until=self._context.wall() + self._context.config.lease_seconds,
                    progress=progress,
                    attempts=run.attempts_if_lost,
                )
            )
        except LeaseLost:
            run.lose()
        else:
            run.meter.record(progress)
            run.lease.renewed(sent_at)
            self._reported[run] = _summary_of(progress)

    async def _check_batch(self, batch_id: str) -> None:
        """End the runs of a batch that was cancelled, expired or deleted."""
        batch = await self._context.aws.run(self._context.deployment.table.get_batch(batch_id))
        reason = end_reason(batch, self._context.wall())
        if reason is not None:
            for run in self._runs:
                if run.shard.batch_id == batch_id:
                    run.end(EarlyEnd(reason))


def _summary_of(progress: Progress) -> tuple[int, bool]:
    """Return the part of the progress that is written at once: new rows, an inherited rate."""
    return progress.num_rows + progress.escalated, progress.rows_per_second > 0


def end_reason(batch: Batch | None, now: float) -> str | None:
    """Return the reason to run no more lines of a batch, or None."""
    if batch is None:
        return "the batch no longer exists"
    if batch.status is not Status.IN_PROGRESS:
        return f"the batch is {batch.status}"
    return "the batch has expired" if batch.expires_at <= now else None
