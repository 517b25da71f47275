"""Admission control: bounds requests and sequences in flight; refuses the rest with 429."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tidemill.protocol.contract import EngineError, Served

from .errors import busy, stopping

SEQUENCES_PER_REQUEST = 8
"""The bound of sequences in flight is this times the bound of requests."""

_MOST_SECONDS = 60
_WEIGHT = 0.1  # of the newest interval, in the moving average


class AdmissionControl:
    """Counts requests in flight: `max_running` run, and up to `max_waiting` more may queue.

    A request weighs as many sequences as it requests, but at most half of the bound, so that the
    largest request is still admitted and never blocks all others.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self._max_inside = max_running + max_waiting
        self._max_sequences = SEQUENCES_PER_REQUEST * self._max_inside
        self._num_sequences = 0
        self.num_in_flight = 0
        self.num_refused = 0
        self.is_closed = False
        self.is_engine_lost = False  # the engine has failed for good
        self._empty = asyncio.Event()
        self._empty.set()
        self._left_at: float | None = None
        self._seconds_between = 0.1  # two finished sequences, while others queue

    @contextmanager
    def admit(self, num_sequences: int = 1) -> Iterator[None]:
        """Hold a place; raises `Refused` when the queue is full or admission is closed."""
        if self.is_closed:
            raise stopping(1)
        weight = min(num_sequences, self._max_sequences // 2)
        if (
            self.num_in_flight >= self._max_inside
            or self._num_sequences + weight > self._max_sequences
        ):
            self.num_refused += 1
            raise busy(self._seconds_to_wait(weight))
        self.num_in_flight += 1
        self._num_sequences += weight
        self._empty.clear()
        try:
            yield
        finally:
            self._note_leaving(weight)
            self.num_in_flight -= 1
            self._num_sequences -= weight
            if not self.num_in_flight:
                self._empty.set()

    def close(self) -> None:
        """Stop admission, at graceful shutdown."""
        self.is_closed = True

    def mark_engine_lost(self) -> None:
        """Stop admission because the engine cannot answer any more."""
        self.is_closed = self.is_engine_lost = True

    async def wait_until_empty(self) -> None:
        """Wait until no request is in flight."""
        await self._empty.wait()

    def _note_leaving(self, weight: int) -> None:
        now = time.monotonic()
        if self._left_at is not None and self._num_sequences > self.max_running:
            passed = (now - self._left_at) / weight
            self._seconds_between += _WEIGHT * (passed - self._seconds_between)
        self._left_at = now

    def _seconds_to_wait(self, weight: int) -> int:
        """Return the `Retry-After`: until half of the queue is gone and this weight fits."""
        num_waiting = self._num_sequences - self.max_running
        too_many = self._num_sequences + weight - self._max_sequences
        seconds = math.ceil(max(num_waiting / 2, too_many) * self._seconds_between)
        return max(1, min(seconds, _MOST_SECONDS))


logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0


@asynccontextmanager
async def watch_engine(
    engine: Served, admission: AdmissionControl, seconds: float = WATCH_SECONDS
) -> AsyncIterator[None]:
    """Poll the engine while entered; stop admission once it has failed for good."""

    async def watch() -> None:
        while True:
            try:
                engine.stats()
            except EngineError as exc:
                logger.error("the engine has failed: %s", exc)  # noqa: TRY400 - the cause is known
                admission.mark_engine_lost()
                return
            await asyncio.sleep(seconds)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
