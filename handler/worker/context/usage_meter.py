"""Usage meter: the work of a worker since its last report, for the metrics."""

from __future__ import annotations

from tidemill.batch.progress_counts import Progress

from ...observability import Metric, figures_of

REPORT_SECONDS = 60.0


class UsageMeter:
    """Sums up rows, tokens and GPU use until `collect`; times are of a monotonic clock."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._done = Progress()
        self._busy_seconds = 0.0
        self._kv_cache_use = 0.0
        self._since: float | None = None

    def add(self, done: Progress) -> None:
        """Add progress that this worker has written to the table."""
        self._done += done

    def add_busy(self, seconds: float, kv_cache_use: float) -> None:
        """Add time with requests in flight, and the share of KV pages in use."""
        self._busy_seconds += seconds
        self._kv_cache_use = max(self._kv_cache_use, kv_cache_use)

    def is_due(self, now: float) -> bool:
        """Return whether unreported work is a minute old; called repeatedly."""
        if self._since is None and (self._busy_seconds or self._done != Progress()):
            self._since = now
        return self._since is not None and now >= self._since + REPORT_SECONDS

    def collect(self) -> dict[Metric, float]:
        """Return the metrics and reset; empty if nothing was done."""
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
