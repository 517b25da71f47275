"""Backpressure: limits on requests in flight, for coroutines and for threads.

A request above the remaining limit waits. A single request above the whole limit is admitted
alone, so that it can run at all.

Three other limits are separate. `server.admission` and `server.request_bodies` refuse instead of
waiting. `sdk.in_flight` orders the answers of threads' futures, and may exceed its byte limit by
one request.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Condition, Lock

_ADMISSIONS_PER_OLDEST = 8


class InFlightLimiter:
    """A semaphore over bytes, and over items if `max_items` is given; for one event loop.

    An item may be released before its bytes: a completed line makes room for the next one while
    its row waits to be written. Items wait in order of arrival or, with `shortest_first`, in order
    of size, except that every eighth admission is the oldest: no item waits forever.
    """

    def __init__(
        self, max_bytes: int, max_items: float = math.inf, *, shortest_first: bool = False
    ) -> None:
        self._max_bytes = max_bytes
        self._items_left = max_items
        self._shortest_first = shortest_first
        self._num_admitted = 0
        self._num_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Acquire an item of `num_bytes`, and release both on leaving."""
        await self.acquire(num_bytes)
        try:
            yield
        finally:
            self.release(num_bytes)

    async def acquire(self, num_bytes: int) -> None:
        """Wait until an item of `num_bytes` fits, and count it as in flight."""
        if not self._waiters and self.try_acquire(num_bytes):
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((num_bytes, admitted))
        if self._shortest_first:
            self._admit_waiters()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():  # it held nothing, but other items may be waiting behind it
                self._admit_waiters()
            else:
                self.release(num_bytes)
            raise

    def try_acquire(self, num_bytes: int) -> bool:
        """Count an item of `num_bytes` as in flight if it fits now; return whether it did."""
        fits = not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes
        if self._items_left <= 0 or not fits:
            return False
        self._items_left -= 1
        self._num_bytes += num_bytes
        return True

    def release(self, num_bytes: int = 0) -> None:
        """Release an item, and `num_bytes` of its bytes."""
        self._items_left += 1
        self._num_bytes -= num_bytes
        if self._waiters:
            self._admit_waiters()

    def release_bytes(self, num_bytes: int) -> None:
        """Release only bytes; a negative number adds bytes, without waiting for room."""
        self._num_bytes -= num_bytes
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiters:
            waiter = num_bytes, admitted = self._next_waiter()
            if not admitted.cancelled():
                if not self.try_acquire(num_bytes):
                    return
                self._num_admitted += 1
                admitted.set_result(None)
            self._waiters.remove(waiter)

    def _next_waiter(self) -> tuple[int, asyncio.Future[None]]:
        is_oldest_due = not (self._num_admitted + 1) % _ADMISSIONS_PER_OLDEST
        if not self._shortest_first or is_oldest_due:
            return self._waiters[0]
        return min(self._waiters, key=lambda waiter: waiter[0])


class MemoryBudget:
    """Limits the bytes that threads are about to allocate."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._waiters: deque[object] = deque()
        self._changed = Condition()
        self._overdraft = Lock()

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[Reservation]:
        """Block until `num_bytes` are free, and reserve them while entered."""
        wanted, ticket = min(num_bytes, self._max_bytes), object()
        with self._changed:
            self._waiters.append(ticket)
            self._changed.wait_for(
                lambda: self._waiters[0] is ticket and wanted <= self._free_bytes
            )
            self._waiters.popleft()
            self._free_bytes -= wanted
            self._changed.notify_all()
        reservation = Reservation(num_bytes, self._overdraft)
        try:
            yield reservation
        finally:
            reservation.release()
            with self._changed:
                self._free_bytes += wanted
                self._changed.notify_all()


class Reservation:
    """Bytes that one thread may allocate; one thread at a time may exceed its reservation."""

    def __init__(self, num_bytes: int, overdraft: Lock) -> None:
        self._num_bytes = num_bytes
        self._overdraft = overdraft
        self._is_overdrawn = False

    def grow(self, num_bytes: int) -> None:
        """Block until `num_bytes` in all may be allocated."""
        if num_bytes > self._num_bytes and not self._is_overdrawn:
            self._overdraft.acquire()
            self._is_overdrawn = True

    def release(self) -> None:
        """Let the next thread exceed its reservation."""
        if self._is_overdrawn:
            self._overdraft.release()
            self._is_overdrawn = False
