"""GPU time: split between shard runs by their requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.protocol.contract import EngineStats

from .context.context import WorkerContext
from .shard.shard_run import ShardRun


class GpuTime:
    """Counts the time of `num_gpus` GPUs; `stats` returns the engine's statistics."""

    def __init__(self, context: WorkerContext, runs: Sequence[ShardRun]) -> None:
        self.num_gpus = 0
        self.stats: Callable[[], EngineStats] = EngineStats
        self._context = context
        self._runs = runs
        self._shared_at = context.clock()

    def share(self) -> None:
        """Split the time since the last call between the runs; called before their requests change.

        It is also called at each heartbeat: longer gaps, in which this process was stopped, are
        not charged.
        """
        now = self._context.clock()
        seconds = min(now - self._shared_at, 2 * self._context.config.tick_seconds)
        self._shared_at = now
        runs = [run for run in self._runs if not run.is_over]
        num_inflight = sum(run.pending.num_inflight for run in runs)
        if not num_inflight:
            return
        for run in runs:
            run.gpu_seconds += seconds * self.num_gpus * run.pending.num_inflight / num_inflight
        stats = self.stats()
        if stats.output_tokens:
            self._context.cold_start.reach("token")
        self._context.usage_meter.add_busy(seconds, stats.kv_cache_usage)
        self._context.rate_meter.add_busy(seconds, is_full=any(run.num_waiting for run in runs))
