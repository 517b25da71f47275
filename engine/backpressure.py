"""Backpressure: bounds on what is in flight, for coroutines and for threads.

Whoever asks for more than there is waits, in the order of asking. A single request above the bound
is let in alone, so that it can run at all.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Condition, Lock


class InFlight:
    """Bounds bytes, and items if `max_items` is given, among the coroutines of one event loop.

    An item may leave before its bytes do: an answered line gives its place back while its row
    waits to be written.
    """

    def __init__(self, max_bytes: int, max_items: float = math.inf) -> None:
        self._max_bytes = max_bytes
        self._items_left = max_items
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, num_bytes: int) -> AsyncIterator[None]:
        """Wait for room for an item of so many bytes, and hold it until left."""
        await self.enter(num_bytes)
        try:
            yield
        finally:
            self.leave(num_bytes)

    async def enter(self, num_bytes: int) -> None:
        """Wait for room for an item of so many bytes."""
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # it held nothing, but others may have waited behind it
                self._admit()
            else:
                self.leave(num_bytes)
            raise

    def leave(self, num_bytes: int = 0) -> None:
        """Give back the place of an item, and so many of its bytes."""
        self._items_left += 1
        self.release(num_bytes)

    def release(self, num_bytes: int) -> None:
        """Hold so many bytes less, or more where they are below nothing."""
        self._held_bytes -= num_bytes
        self._admit()

    def _has_room(self, num_bytes: int) -> bool:
        fits = not self._held_bytes or self._held_bytes + num_bytes <= self._max_bytes
        return self._items_left > 0 and fits

    def _take(self, num_bytes: int) -> None:
        self._items_left -= 1
        self._held_bytes += num_bytes

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._has_room(num_bytes):
                    return
                self._take(num_bytes)
                turn.set_result(None)
            self._waiting.popleft()


class MemoryBudget:
    """Bounds the bytes that threads are about to allocate."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._waiting: deque[object] = deque()
        self._changed = Condition()
        self._beyond = Lock()

    @contextmanager
    def reserved(self, num_bytes: int) -> Iterator[Reservation]:
        """Block until so many bytes are free, and reserve them until left."""
        wanted, ticket = min(num_bytes, self._max_bytes), object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(
                lambda: self._waiting[0] is ticket and wanted <= self._free_bytes
            )
            self._waiting.popleft()
            self._free_bytes -= wanted
            self._changed.notify_all()
        reservation = Reservation(num_bytes, self._beyond)
        try:
            yield reservation
        finally:
            reservation.end()
            with self._changed:
                self._free_bytes += wanted
                self._changed.notify_all()


class Reservation:
    """Bytes that one thread may allocate; of all that outgrow theirs, one goes on at a time."""

    def __init__(self, num_bytes: int, beyond: Lock) -> None:
        self._num_bytes = num_bytes
        self._beyond = beyond
        self._is_beyond = False

    def grow(self, num_bytes: int) -> None:
        """Block until so many bytes may be allocated in all."""
        if num_bytes > self._num_bytes and not self._is_beyond:
            self._beyond.acquire()
            self._is_beyond = True

    def end(self) -> None:
        """Let the next one outgrow its reservation."""
        if self._is_beyond:
            self._beyond.release()
            self._is_beyond = False
