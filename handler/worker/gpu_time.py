"""Whose the GPUs' time is: the runs share it by the requests that each has in the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contract import EngineStats
from handler.worker.shard.shard_run import ShardRun
from handler.worker.site.site import Site


class GpuTime:
    """Counts the time of `num_gpus` GPUs; `stats` tells what the engine does now."""

    def __init__(self, site: Site, runs: Sequence[ShardRun]) -> None:
        self.num_gpus = 0
        self.stats: Callable[[], EngineStats] = EngineStats
        self._site = site
        self._runs = runs
        self._shared_at = site.clock()

    def share(self) -> None:
        """Give the time since the last call to the runs; called before their requests change.

        It is called at each beat, too: time beyond that, for which this process was stopped, is
        nobody's.
        """
        now = self._site.clock()
        seconds = min(now - self._shared_at, 2 * self._site.config.tick_seconds)
        self._shared_at = now
        runs = [run for run in self._runs if not run.is_over]
        num_inflight = sum(run.agenda.num_inflight for run in runs)
        if not num_inflight:
            return
        for run in runs:
            run.gpu_seconds += seconds * self.num_gpus * run.agenda.num_inflight / num_inflight
        stats = self.stats()
        if stats.output_tokens:
            self._site.cold_start.reach("token")
        self._site.meter.work(seconds, stats.kv_cache_usage)
        self._site.tempo.work(seconds, is_full=any(run.num_waiting for run in runs))
