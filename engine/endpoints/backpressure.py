"""Backpressure: long work on bodies goes to threads, within a limit of bytes in flight.

A tokenizer takes about 160 bytes of memory for each byte of its text; each value of a result
becomes about 400 bytes of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from tidemill.protocol.in_flight import InFlightLimiter

from ..heap_trim import schedule_trim

SHORT_BYTES = 20_000
"""Below this the work takes a few milliseconds at most, less than to wait behind longer work."""

MAX_BYTES_AT_ONCE = 2 * 2**20

_LANE_SHARE = 8

# Values of a body that are counted: about as long as a short body may take.
_MOST_LOOKED_AT = 20_000

_Value = TypeVar("_Value")
_Arguments = TypeVarTuple("_Arguments")


def body_size(body: dict[str, Any], most: int = MAX_BYTES_AT_ONCE) -> int:
    """Return about how many bytes a body holds; an entry of a list counts as one.

    A body above `most`, or of a great many values, is not counted to its end: the size is then more
    than `most`.
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


class BoundedExecutor:
    """Calls functions within a limit of bytes; one above it runs alone.

    A function on no more than `short_bytes` is called inline, longer ones in threads, in order of
    arrival. If the work is `interactive`, there is a round of the event loop between two that run
    inline, and in threads the shortest runs first. Work on up to an eighth of the limit then has a
    limit of its own, so that it never waits for the longest.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES_AT_ONCE,
        *,
        short_bytes: int = SHORT_BYTES,
        interactive: bool = False,
        num_threads: int | None = None,
    ) -> None:
        self._threads = None if num_threads is None else ThreadPoolExecutor(num_threads)
        self._alternating = asyncio.Lock() if interactive else None
        self._in_flight = InFlightLimiter(max_bytes, shortest_first=interactive)
        self._lane_bytes = max_bytes // _LANE_SHARE if interactive else 0
        self._lane = InFlightLimiter(self._lane_bytes, shortest_first=interactive)
        self._short_bytes = short_bytes

    async def run(
        self, num_bytes: int, function: Callable[[*_Arguments], _Value], *arguments: *_Arguments
    ) -> _Value:
        """Return the function's value; its input of `num_bytes` may wait for room."""
        if num_bytes <= self._short_bytes:
            if self._alternating is None:
                return function(*arguments)
            async with self._alternating:
                value = function(*arguments)
                await asyncio.sleep(0)
                return value
        in_flight = self._lane if num_bytes <= self._lane_bytes else self._in_flight
        await in_flight.acquire(num_bytes)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except BaseException:  # such as that there can be no more threads
            in_flight.release(num_bytes)
            raise
        # A thread cannot be cancelled: its bytes are released when it ends.
        work.add_done_callback(lambda _: _end(in_flight, num_bytes))
        try:
            return await asyncio.shield(work)
        finally:
            # An exception refers to this frame and the future to the exception: that cycle would
            # keep a refused body until garbage collection.
            del work


def _end(in_flight: InFlightLimiter, num_bytes: int) -> None:
    in_flight.release(num_bytes)
    schedule_trim()
