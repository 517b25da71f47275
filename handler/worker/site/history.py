"""What a worker has added to each batch over time: for plots, never the truth about anything."""

from __future__ import annotations

from typing import NamedTuple

from handler.batch.history import bucket_of
from handler.batch.model import Batch, Progress

TELL_SECONDS = 10.0


class Gains(NamedTuple):
    """What one batch has gained in a bucket of its history."""

    batch: Batch
    start: int
    seconds: int
    gained: Progress


class History:
    """Sums up gains until `take`; `now` is Unix time for `count`, any clock's for `is_due`."""

    def __init__(self) -> None:
        self._gains: dict[tuple[str, int], Gains] = {}
        self._taken_at = float("-inf")

    def count(self, batch: Batch, gained: Progress, now: float) -> None:
        """Take what the table has learned from this worker."""
        if gained.num_rows == 0:
            return
        start, seconds = bucket_of(batch, now)
        known = self._gains.get((batch.id, start), Gains(batch, start, seconds, Progress()))
        self._gains[batch.id, start] = known._replace(gained=known.gained + gained)

    def is_due(self, now: float) -> bool:
        """Say whether there is something that was not told for a while."""
        return bool(self._gains) and now >= self._taken_at + TELL_SECONDS

    def take(self, now: float) -> list[Gains]:
        """Return the gains, once."""
        gains, self._gains = list(self._gains.values()), {}
        self._taken_at = now
        return gains
