"""What a worker has done since it last told, for the metrics."""

from __future__ import annotations

from handler.batch.model import Progress
from handler.metrics import Metric, figures_of

TELL_SECONDS = 60.0


class Meter:
    """Sums up until `take`; times are those of one clock that is never set."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._done = Progress()
        self._busy_seconds = 0.0
        self._kv_cache_use = 0.0
        self._since: float | None = None

    def count(self, done: Progress) -> None:
        """Take what the table has learned from this worker alone."""
        self._done += done

    def work(self, seconds: float, kv_cache_use: float) -> None:
        """Take time in which requests were in the engine, and the share of KV pages in use."""
        self._busy_seconds += seconds
        self._kv_cache_use = max(self._kv_cache_use, kv_cache_use)

    def is_due(self, now: float) -> bool:
        """Say whether there has been something to tell for a minute; called again and again."""
        if self._since is None and (self._busy_seconds or self._done != Progress()):
            self._since = now
        return self._since is not None and now >= self._since + TELL_SECONDS

    def take(self) -> dict[Metric, float]:
        """Return the figures, once; none where nothing was done."""
        done, busy_seconds, kv_cache_use = self._done, self._busy_seconds, self._kv_cache_use
        self._reset()
        if not busy_seconds and done == Progress():
            return {}
        figures = figures_of(done)
        if busy_seconds:
            rate = done.completion_tokens / busy_seconds
            figures[Metric.TOKENS_PER_SECOND] = round(rate, 3)
            figures[Metric.KV_CACHE_USE] = round(100 * kv_cache_use, 3)
        return figures
