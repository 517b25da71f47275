"""How much of all batches together is on its way at once; who has waited longest comes first."""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """Bounds lines that are being answered, and bytes of these and of rows that are not durable.

    Batches that run at the same time take turns, line by line.
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._lines_left = max_lines
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, num_bytes: int) -> None:
        """Wait for room for a line; above the bound it comes alone."""
        if not self._waiting and self._has_room(num_bytes):
            self._take(num_bytes)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self.leave()
                self.release(num_bytes)
            self._look()
            raise

    def leave(self) -> None:
        """Give back the place of a line that is answered; its bytes stay held."""
        self._lines_left += 1
        self._look()

    def release(self, num_bytes: int) -> None:
        """Hold so many bytes less, or more where they are below nothing."""
        self._held_bytes -= num_bytes
        self._look()

    def _has_room(self, num_bytes: int) -> bool:
        fits = not self._held_bytes or self._held_bytes + num_bytes <= self._max_bytes
        return self._lines_left > 0 and fits

    def _take(self, num_bytes: int) -> None:
        self._lines_left -= 1
        self._held_bytes += num_bytes

    def _look(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if not self._has_room(num_bytes):
                    return
                self._take(num_bytes)
                turn.set_result(None)
            self._waiting.popleft()
