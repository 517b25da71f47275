"""Progress history of batches over time: for plots only, never authoritative."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.batch.model import Batch
from tidemill.batch.progress import history_bucket
from tidemill.batch.progress_counts import Progress

REPORT_SECONDS = 10.0


class Gains(NamedTuple):
    """Progress of one batch in one bucket of its history."""

    batch: Batch
    start: int
    seconds: int
    gained: Progress


class History:
    """Sums up progress until `collect`; `now` is Unix time in `add`, monotonic in `is_due`."""

    def __init__(self) -> None:
        self._gains: dict[tuple[str, int], Gains] = {}
        self._taken_at = float("-inf")

    def add(self, batch: Batch, gained: Progress, now: float) -> None:
        """Add progress that this worker has written to the table."""
        if gained.num_rows + gained.escalated == 0:
            return
        start, seconds = history_bucket(batch, now)
        known = self._gains.get((batch.id, start), Gains(batch, start, seconds, Progress()))
        self._gains[batch.id, start] = known._replace(gained=known.gained + gained)

    def is_due(self, now: float) -> bool:
        """Return whether unwritten progress is old enough to be written."""
        return bool(self._gains) and now >= self._taken_at + REPORT_SECONDS

    def collect(self, now: float) -> list[Gains]:
        """Return the gains and reset."""
        gains, self._gains = list(self._gains.values()), {}
        self._taken_at = now
        return gains
