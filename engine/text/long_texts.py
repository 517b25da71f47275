"""Long texts are tokenized in threads, and only so many bytes of them at once.

A tokenizer takes about 160 bytes of memory for each byte of a text that it works on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from engine.text.tokenizer import Tokenizer

MAX_BYTES_AT_ONCE = 2 * 2**20


class LongTexts:
    """Tokenizes texts in the order in which they come; one above the bound has its turn alone."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES_AT_ONCE) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, once there is room for it."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        await self._take(num_bytes)
        work = asyncio.get_running_loop().run_in_executor(
            None, partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        )
        # A thread cannot be called off: its room is free when it has ended, whoever still waits.
        work.add_done_callback(lambda _: self._give_back(num_bytes))
        return await asyncio.shield(work)

    async def _take(self, num_bytes: int) -> None:
        if not self._waiting and self._has_room(num_bytes):
            self._held_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(num_bytes)
            raise

    def _give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        while self._waiting and (
            self._waiting[0][1].cancelled() or self._has_room(self._waiting[0][0])
        ):
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._held_bytes += wanted
                turn.set_result(None)

    def _has_room(self, num_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + num_bytes <= self._max_bytes
