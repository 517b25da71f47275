"""Rate meter: the throughput of this worker at full load, for the demand of its fleet."""

from __future__ import annotations

from tidemill.batch.fleet import WorkerRate
from tidemill.batch.progress_counts import Progress

REPORT_SECONDS = 60.0
# Shorter measurements are noise: rows finish in bursts.
_LEAST_SECONDS = 30.0


class RateMeter:
    """Sums up rows, tokens and time until `collect`; `now` is of a monotonic clock.

    Rates count only time in which lines waited for the engine: an underused worker seems slow, and
    the model's next large file would get too many workers.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._tokens = 0.0
        self._expected_work = 0.0
        self._gpu_seconds = 0.0
        self._busy_seconds = 0.0
        self._full_seconds = 0.0
        self._has_rows = False
        self._reported_at = float("-inf")

    def add(self, done: Progress) -> None:
        """Add progress that this worker has written to the table."""
        if num_rows := done.num_rows + done.escalated:
            # Reused rows cost nothing, and the next file may have none.
            computed = 1 - done.reused / num_rows
            self._rows += num_rows * computed
            self._expected_work += done.expected.work * computed
        self._tokens += done.prompt_tokens + done.completion_tokens
        self._gpu_seconds += done.gpu_seconds
        self._has_rows = self._has_rows or num_rows > 0

    def add_busy(self, seconds: float, *, is_full: bool) -> None:
        """Add time with requests in flight, and whether lines waited for the engine."""
        self._busy_seconds += seconds
        self._full_seconds += seconds if is_full else 0.0

    def is_due(self, now: float) -> bool:
        """Return whether rows have become durable since the last report, at least a minute ago."""
        return self._has_rows and now >= self._reported_at + REPORT_SECONDS

    def collect(self, now: float, wall: float) -> WorkerRate:
        """Return the time of the last durable row, and the rates if there is enough data."""
        self._reported_at, self._has_rows = now, False
        pace = WorkerRate(int(wall))
        if self._busy_seconds < _LEAST_SECONDS:
            return pace
        if 2 * self._full_seconds >= self._busy_seconds:
            pace = WorkerRate(
                int(wall),
                round(self._rows / self._busy_seconds, 6),
                round(self._tokens / self._busy_seconds, 3),
                round(self._expected_work / self._busy_seconds, 3),
                round(self._gpu_seconds / self._busy_seconds),
            )
            self._keep(0.5)  # exponential decay of older data
        else:
            self._keep(0.0)
        return pace

    def _keep(self, share: float) -> None:
        self._rows *= share
        self._tokens *= share
        self._expected_work *= share
        self._gpu_seconds *= share
        self._busy_seconds *= share
        self._full_seconds *= share
