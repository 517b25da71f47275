"""Admission: how many requests, and sequences of these, may be inside; none once it is closed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import busy, stopping

SEQUENCES_PER_REQUEST = 8
"""So many sequences as this have room, times the requests that have."""

_MOST_SECONDS = 60
_WEIGHT = 0.1  # of the newest, in the mean time between two that leave


class Gate:
    """Counts those inside: up to `max_running` run, and `max_waiting` more may wait for them.

    A request weighs as many sequences as it asks for, but no more than half of all that have room:
    so the largest is let in, too, and never keeps all others out.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_inside = max_running + max_waiting
        self._max_sequences = SEQUENCES_PER_REQUEST * self._max_inside
        self._num_sequences = 0
        self.num_inside = 0
        self.num_refused = 0
        self.is_closed = False
        self.is_lost = False  # there is nothing behind it any more
        self._empty = asyncio.Event()
        self._empty.set()
        self._left_at: float | None = None
        self._seconds_between = 0.1  # two sequences that leave, while others wait

    @contextmanager
    def entered(self, num_sequences: int = 1) -> Iterator[None]:
        """Be inside; raises `Refused` where there is no room, or the gate is closed."""
        if self.is_closed:
            raise stopping(1)
        weight = min(num_sequences, self._max_sequences // 2)
        if (
            self.num_inside >= self._max_inside
            or self._num_sequences + weight > self._max_sequences
        ):
            self.num_refused += 1
            raise busy(self._seconds_to_wait(weight))
        self.num_inside += 1
        self._num_sequences += weight
        self._empty.clear()
        try:
            yield
        finally:
            self._note_leaving(weight)
            self.num_inside -= 1
            self._num_sequences -= weight
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

    def _note_leaving(self, weight: int) -> None:
        now = time.monotonic()
        if self._left_at is not None and self._num_sequences > self._max_running:
            passed = (now - self._left_at) / weight
            self._seconds_between += _WEIGHT * (passed - self._seconds_between)
        self._left_at = now

    def _seconds_to_wait(self, weight: int) -> int:
        """Return in how many seconds half of those that wait, and room for these, will be gone."""
        num_waiting = self._num_sequences - self._max_running
        too_many = self._num_sequences + weight - self._max_sequences
        seconds = math.ceil(max(num_waiting / 2, too_many) * self._seconds_between)
        return max(1, min(seconds, _MOST_SECONDS))
