"""The one task that keeps what a worker holds: leases and messages; and looks for ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn

from handler.batch.model import Batch, Progress
from handler.batch.states import Status
from handler.errors import AwsError, LeaseLost
from handler.log import logger
from handler.worker.gpu_time import GpuTime
from handler.worker.shard.shard_run import Ending, ShardRun
from handler.worker.site.site import Site


class Heartbeat:
    """Beats every `tick_seconds`.

    Each thing has a task of its own within a beat, and a slow one is not begun twice, so that it
    holds nothing else up.
    """

    def __init__(self, site: Site, runs: Sequence[ShardRun], gpu_time: GpuTime) -> None:
        self._site = site
        self._runs = runs
        self._gpu_time = gpu_time
        self._going: dict[object, asyncio.Task[None]] = {}
        self._told: dict[ShardRun, object] = {}

    async def beat_for_ever(self) -> NoReturn:
        """Beat until cancelled."""
        try:
            while True:
                self.beat()
                await asyncio.sleep(self._site.config.tick_seconds)
        finally:
            for task in list(self._going.values()):
                task.cancel()

    def beat(self) -> None:
        """Begin whatever is due."""
        self._gpu_time.share()
        runs = [run for run in self._runs if not run.is_over]
        self._told = {run: told for run, told in self._told.items() if run in runs}
        for run in runs:
            if run.lease.is_over:
                run.lose()
            elif run.lease.is_due or self._told.get(run) != _news_of(run.progress):
                self._begin(("lease", run), partial(self._renew, run))
            self._begin(("message", run), run.doorbell.keep)
        for batch_id in {run.shard.batch_id for run in runs}:
            self._begin(("batch", batch_id), partial(self._look_at, batch_id))
        if self._site.history.is_due(self._site.clock()):
            self._begin("history", self._site.tell_history)
        if self._site.tempo.is_due(self._site.clock()):
            self._begin("tempo", self._site.tell_tempo)
        if self._site.meter.is_due(self._site.clock()):
            self._site.tell(self._site.meter.take())

    def _begin(self, what: object, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if what in self._going:
            return
        task = self._going[what] = asyncio.create_task(self._try(make()))
        task.add_done_callback(lambda _: self._going.pop(what))

    async def _try(self, doing: Coroutine[Any, Any, None]) -> None:
        """Do one thing; what fails or takes too long is done again at the next beat."""
        try:
            async with asyncio.timeout(self._site.config.lease_seconds / 3):
                await doing
        except (AwsError, TimeoutError) as exc:
            logger.warning("heartbeat failed", reason=repr(exc))
        except Exception:  # noqa: BLE001 - an error of ours in one thing must not stop the others
            logger.exception("heartbeat failed")

    async def _renew(self, run: ShardRun) -> None:
        sent_at = self._site.clock()
        progress = run.progress
        try:
            await self._site.aws.run(
                self._site.deployment.table.renew(
                    run.shard,
                    lease_until=self._site.wall() + self._site.config.lease_seconds,
                    progress=progress,
                    attempts=run.attempts,
                )
            )
        except LeaseLost:
            run.lose()
        else:
            run.told(progress)
            run.lease.renewed(sent_at)
            self._told[run] = _news_of(progress)

    async def _look_at(self, batch_id: str) -> None:
        """End the runs of a batch that is to go no further."""
        batch = await self._site.aws.run(self._site.deployment.table.get_batch(batch_id))
        reason = why_end(batch, self._site.wall())
        if reason is not None:
            for run in self._runs:
                if run.shard.batch_id == batch_id:
                    run.end(Ending(reason))


def _news_of(progress: Progress) -> tuple[int, bool]:
    """Return what a batch is to hear of at once: new rows, and a pace that was taken over."""
    return progress.num_rows, progress.rows_per_second > 0


def why_end(batch: Batch | None, now: float) -> str | None:
    """Return why no line of a batch may be run any more, or None."""
    if batch is None:
        return "the batch is gone"
    if batch.status is not Status.IN_PROGRESS:
        return f"the batch is {batch.status}"
    return "the batch has expired" if batch.expires_at <= now else None
