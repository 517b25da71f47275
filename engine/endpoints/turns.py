"""What is long goes to threads, and only so many bytes of it at once.

A tokenizer takes about 160 bytes of memory for each byte of a text that it works on; of a result's
values each becomes about 400 bytes of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from engine.allocator import note_freed
from engine.backpressure import InFlight

SHORT_BYTES = 20_000
"""So much takes a few milliseconds at most, less than it is worth to hand it over."""

MAX_BYTES_AT_ONCE = 2 * 2**20

# Of values that a body holds so many are looked at: about as long as a short body may take.
_MOST_LOOKED_AT = 20_000

_Value = TypeVar("_Value")
_Arguments = TypeVarTuple("_Arguments")


def size_of_body(body: dict[str, Any], most: int = MAX_BYTES_AT_ONCE) -> int:
    """Return about how many bytes a body holds; an entry of a list counts as one.

    What is above `most`, or holds a great many values, is not counted to its end: that is more than
    `most`.
    """
    size = num_values = 0
    seen: list[dict[str, Any] | list[Any]] = [body]
    for holder in seen:  # which grows by what is found inside
        num_values += len(holder)
        if size > most or num_values > _MOST_LOOKED_AT:
            return max(size, most + 1)
        inside: Iterable[Any] = holder
        if isinstance(holder, dict):
            size += sum(map(len, holder))
            inside = holder.values()
        else:
            size += len(holder)
        for value in inside:
            if isinstance(value, str):
                is_counted = value.isascii() or len(value) > most
                size += len(value) if is_counted else len(value.encode("utf-8", "replace"))
            elif isinstance(value, bytes):
                size += len(value)
            elif isinstance(value, (dict, list)):
                seen.append(value)
    return size


class Turns:
    """Calls functions in the order in which they come; one above the bound has its turn alone.

    One that works on no more than `short_bytes` is called at once, where it is asked for; if they
    `alternate`, with a round of the loop between two, so that many at once hold nobody else up.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES_AT_ONCE,
        *,
        short_bytes: int = SHORT_BYTES,
        alternate: bool = False,
        num_threads: int | None = None,
    ) -> None:
        self._threads = None if num_threads is None else ThreadPoolExecutor(num_threads)
        self._alternating = asyncio.Lock() if alternate else None
        self._in_flight = InFlight(max_bytes)
        self._short_bytes = short_bytes

    async def run(
        self, num_bytes: int, function: Callable[[*_Arguments], _Value], *arguments: *_Arguments
    ) -> _Value:
        """Return what a function returns that works on so many bytes, once there is room for it."""
        if num_bytes <= self._short_bytes:
            if self._alternating is None:
                return function(*arguments)
            async with self._alternating:
                value = function(*arguments)
                await asyncio.sleep(0)
                return value
        await self._in_flight.enter(num_bytes)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except BaseException:  # such as that there can be no more threads
            self._in_flight.leave(num_bytes)
            raise
        # A thread cannot be called off: its room is free when it has ended, whoever still waits.
        work.add_done_callback(lambda _: self._end(num_bytes))
        try:
            return await asyncio.shield(work)
        finally:
            # What fails holds this frame, and the work what failed: with a name for it here, a
            # refused body would stay until somebody looks for garbage.
            del work

    def _end(self, num_bytes: int) -> None:
        self._in_flight.leave(num_bytes)
        note_freed()
