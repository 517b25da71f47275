"""How fast this worker goes at full load, for who reckons how many workers are wanted."""

from __future__ import annotations

from handler.batch.fleet import Pace
from handler.batch.model import Progress

TELL_SECONDS = 60.0
# In less time what is counted is chance: rows come in heaps.
_LEAST_SECONDS = 30.0


class Tempo:
    """Sums up until `take`; `now` is the time of one clock that is never set.

    Rates are of time in which lines waited for the engine: one that has little to do looks slow,
    and would have a model's next large file run by too many.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._tokens = 0.0
        self._busy_seconds = 0.0
        self._full_seconds = 0.0
        self._has_rows = False
        self._told_at = float("-inf")

    def count(self, done: Progress) -> None:
        """Take what the table has learned from this worker alone."""
        self._rows += done.num_rows
        self._tokens += done.prompt_tokens + done.completion_tokens
        self._has_rows = self._has_rows or done.num_rows > 0

    def work(self, seconds: float, *, is_full: bool) -> None:
        """Take time in which requests were in the engine, and whether lines waited for it."""
        self._busy_seconds += seconds
        self._full_seconds += seconds if is_full else 0.0

    def is_due(self, now: float) -> bool:
        """Say whether rows have become durable since it was told, a minute ago at least."""
        return self._has_rows and now >= self._told_at + TELL_SECONDS

    def take(self, now: float, wall: float) -> Pace:
        """Return that rows have become durable, and the rates where there is enough to tell."""
        self._told_at, self._has_rows = now, False
        pace = Pace(int(wall))
        if self._busy_seconds < _LEAST_SECONDS:
            return pace
        if 2 * self._full_seconds >= self._busy_seconds:
            pace = Pace(
                int(wall),
                round(self._rows / self._busy_seconds, 6),
                round(self._tokens / self._busy_seconds, 3),
            )
            self._keep(0.5)  # what is older counts for less and less
        else:
            self._keep(0.0)
        return pace

    def _keep(self, share: float) -> None:
        self._rows *= share
        self._tokens *= share
        self._busy_seconds *= share
        self._full_seconds *= share
