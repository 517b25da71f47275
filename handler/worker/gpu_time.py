"""GPU time: split between shard runs by their requests in flight, engine by engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidemill.protocol.contract import EngineStats

from .context.context import WorkerContext
from .shard.shard_run import ShardRun


@dataclass(slots=True, eq=False)
class EngineLoad:
    """Load of one engine: its GPUs, its statistics, and each run's lines in it."""

    num_gpus: int = 0
    stats: Callable[[], EngineStats] = EngineStats
    lines: dict[ShardRun, set[int]] = field(default_factory=dict)

    def add(self, run: ShardRun, number: int) -> None:
        """Add a line that was sent to the engine."""
        self.lines.setdefault(run, set()).add(number)

    def remove(self, run: ShardRun, number: int) -> None:
        """Remove a line that the engine no longer has."""
        lines = self.lines[run]
        lines.remove(number)
        if not lines:
            del self.lines[run]


class GpuTime:
    """Counts the GPU time of the live `engines` while they have lines.

    An idle engine is charged to no tenant, like an idle worker.
    """

    def __init__(self, context: WorkerContext, runs: Sequence[ShardRun]) -> None:
        self.engines: list[EngineLoad] = []
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
        busy = [engine for engine in self.engines if engine.lines]
        if not busy:
            return
        for engine in busy:
            num_inflight = sum(map(len, engine.lines.values()))
            for run, lines in engine.lines.items():
                run.meter.gpu_seconds += seconds * engine.num_gpus * len(lines) / num_inflight
        stats = [engine.stats() for engine in busy]
        if any(each.output_tokens for each in stats):
            self._context.cold_start.reach("token")
        kv_cache_usage = max(each.kv_cache_usage for each in stats)
        self._context.usage_meter.add_busy(seconds, kv_cache_usage)
        is_full = any(run.num_waiting for run in self._runs if not run.is_over)
        self._context.rate_meter.add_busy(seconds, is_full=is_full)
