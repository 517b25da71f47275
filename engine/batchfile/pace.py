"""How fast a run makes rows now, by which people can be told when it will be through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW_SECONDS = 60.0
# Of a run that has just begun: its first rows say little, and less of when it will end.
_MIN_SECONDS = 1.0
_TELLING_SECONDS = 20.0
_TELLING_SHARE = 0.02


class Rates(NamedTuple):
    """Rows, good or bad, and generated tokens a second."""

    rows_per_second: float
    tokens_per_second: float


class Pace:
    """Rates over the last minute, or since it was made: they fall while nothing comes.

    A shard may last for seconds: the next one goes on from it, or its batch would seem to stand.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._gains: deque[tuple[float, int, int]] = deque()

    def add(self, num_rows: int, num_tokens: int) -> None:
        """Take rows that are finished now, and tokens that were generated."""
        self._gains.append((self._clock(), num_rows, num_tokens))

    def go_on_from(self, other: Pace) -> None:
        """Count what another run of the batch made, which has ended: its rates end with it."""
        self._since = min(self._since, other._since)
        self._gains = deque(sorted([*self._gains, *other._gains]))

    @property
    def rates(self) -> Rates:
        """Return the rates as they are now."""
        now = self._clock()
        while self._gains and self._gains[0][0] < now - WINDOW_SECONDS:
            self._gains.popleft()
        seconds = max(_MIN_SECONDS, min(WINDOW_SECONDS, now - self._since))
        rows = sum(num_rows for _, num_rows, _ in self._gains)
        tokens = sum(num_tokens for _, _, num_tokens in self._gains)
        return Rates(round(rows / seconds, 3), round(tokens / seconds, 3))


def seconds_left(
    num_done: int, num_rows: int, seconds: float, rows_per_second: float
) -> float | None:
    """Return when the rest of the rows would be there at this rate.

    None while nobody can know: at no rate, and before 2 % of the rows or 20 seconds.
    """
    left = num_rows - num_done
    is_told = num_done >= _TELLING_SHARE * num_rows or seconds >= _TELLING_SECONDS
    if left <= 0 or rows_per_second <= 0 or not is_told:
        return None
    return left / rows_per_second
