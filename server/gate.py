"""Which requests are let in: so many at once, and none once the server is being stopped."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import busy, stopping

_MOST_SECONDS = 60
_WEIGHT = 0.1  # of the newest, in the mean time between two that leave


class Gate:
    """Counts those inside: up to `max_running` run, and `max_waiting` more may wait for them."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_inside = max_running + max_waiting
        self.num_inside = 0
        self.num_refused = 0
        self.is_closed = False
        self.is_lost = False  # there is nothing behind it any more
        self._empty = asyncio.Event()
        self._empty.set()
        self._left_at: float | None = None
        self._seconds_between = 0.1

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside; raises `Refused` where there is no room, or the gate is closed."""
        if self.is_closed:
            raise stopping(1)
        if self.num_inside >= self._max_inside:
            self.num_refused += 1
            raise busy(self._seconds_to_wait())
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            self._note_leaving()
            if not self.num_inside:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self.is_closed = True

    def give_up(self) -> None:
        """Let nobody in any more: nothing can be answered."""
        self.is_closed = self.is_lost = True

    async def wait_until_empty(self) -> None:
        """Wait for all that are inside."""
        await self._empty.wait()

    def _note_leaving(self) -> None:
        now = time.monotonic()
        if self._left_at is not None and self.num_inside >= self._max_running:
            passed = now - self._left_at
            self._seconds_between += _WEIGHT * (passed - self._seconds_between)
        self._left_at = now

    def _seconds_to_wait(self) -> int:
        """Return in how many seconds half of those that wait will have had their turn."""
        num_waiting = self._max_inside - self._max_running
        seconds = math.ceil(num_waiting / 2 * self._seconds_between)
        return max(1, min(seconds, _MOST_SECONDS))
