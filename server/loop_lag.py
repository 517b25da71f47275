"""Event loop lag: a histogram of how late a sleeping task is woken."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

NAME = "tidemill_loop_lag_seconds"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

_PAUSE_SECONDS = 0.05


class LoopLag:
    """Histogram of lags, sampled twenty times a second; read from any thread.

    An iteration of the loop that takes longer than the interval counts as one lag.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0
        self.longest = 0.0

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure the running loop while entered."""
        measuring = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            measuring.cancel()
            with suppress(asyncio.CancelledError):
                await measuring

    def observe(self, seconds: float) -> None:
        """Record one lag."""
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds
        self.longest = max(self.longest, seconds)

    def collect(self) -> list[Metric]:
        """Return the histogram as a Prometheus metric."""
        from prometheus_client.core import HistogramMetricFamily

        num, buckets = 0, []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts, strict=True):
            num += count
            buckets.append((bound, float(num)))
        words = "Delay between a task's wake-up time and the event loop waking it."
        return [HistogramMetricFamily(NAME, words, buckets=buckets, sum_value=self._sum)]

    async def _measure(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_PAUSE_SECONDS)
            self.observe(max(0.0, time.monotonic() - begun - _PAUSE_SECONDS))
