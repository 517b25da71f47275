"""Backpressure: long work on bodies runs in threads, within a limit on bytes in flight.

A tokenizer takes about 160 bytes of memory for each byte of text. Each value of a result becomes
about 400 bytes of a body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar, TypeVarTuple

from tidemill.protocol.in_flight import InFlightLimiter

from ..heap_trim import schedule_trim

SHORT_BYTES = 20_000
"""Work below this size takes a few milliseconds: less than waiting behind longer work."""

MAX_BYTES_AT_ONCE = 2 * 2**20

_LANE_SHARE = 8

# Limit on the values of a body that are counted, so that counting takes no longer than a short
# body.
_MAX_COUNTED_VALUES = 20_000

_Value = TypeVar("_Value")
_Arguments = TypeVarTuple("_Arguments")


def body_size(body: dict[str, Any], most: int = MAX_BYTES_AT_ONCE) -> int:
    """Return the approximate size of a body in bytes; an entry of a list counts as one.

    Counting stops above `most` bytes, or after very many values; the returned size is then above
    `most`.
    """
    size = num_values = 0
    seen: list[dict[str, Any] | list[Any]] = [body]
    for holder in seen:  # which grows by the containers found inside
        num_values += len(holder)
        if size > most or num_values > _MAX_COUNTED_VALUES:
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

    Work on at most `short_bytes` is called inline; longer work runs in threads, first come, first
    served. If the work is `interactive`, the event loop runs once between two inline calls, and the
    shortest work in threads runs first. Work on up to an eighth of the limit then has its own
    limit, so that it never waits for the longest.
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
        self._clock = Lock()
        self.seconds = 0.0  # of all calls, in all threads

    async def run(
        self, num_bytes: int, function: Callable[[*_Arguments], _Value], *arguments: *_Arguments
    ) -> _Value:
        """Return the function's value; work on `num_bytes` may wait for others to finish."""
        if num_bytes <= self._short_bytes:
            if self._alternating is None:
                return self._call(function, *arguments)
            async with self._alternating:
                value = self._call(function, *arguments)
                await asyncio.sleep(0)
                return value
        in_flight = self._lane if num_bytes <= self._lane_bytes else self._in_flight
        await in_flight.acquire(num_bytes)
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._call, function, *arguments)
        except BaseException:  # for example if no more threads can start
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

    def _call(self, function: Callable[[*_Arguments], _Value], *arguments: *_Arguments) -> _Value:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            seconds = time.perf_counter() - began
            with self._clock:
                self.seconds += seconds


def _end(in_flight: InFlightLimiter, num_bytes: int) -> None:
    in_flight.release(num_bytes)
    schedule_trim()
