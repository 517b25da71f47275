"""Retry: delays between attempts, and the retry loop."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def exponential_delay(
    number: int, first: float, *, factor: float = 2.0, most: float = math.inf
) -> float:
    """Return the seconds before retry `number`, counted from 0: at most `most`."""
    try:
        return min(most, first * factor**number)
    except OverflowError:
        return most


def exponential_delays(
    first: float, *, factor: float = 2.0, most: float = math.inf
) -> Iterator[float]:
    """Yield the seconds before each retry, without end."""
    return (exponential_delay(number, first, factor=factor, most=most) for number in count())


def with_jitter(delay: float) -> float:
    """Return 0.5 to 1.5 times a delay, so that colliding callers do not collide again."""
    return delay * random.uniform(0.5, 1.5)  # noqa: S311


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a numeric `Retry-After` header, or None."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _always(_: Exception) -> bool:
    return True


def _silently(_: Exception, _delay: float) -> None:
    """Report nothing."""


def retry(
    attempt: Callable[[], T],
    delays: Iterable[float],
    errors: type[E] | tuple[type[E], ...],
    is_retryable: Callable[[E], bool] = _always,
    *,
    notify: Callable[[E, float], object] = _silently,
) -> T:
    """Return the result of `attempt`, repeated after each delay while it fails with `errors`.

    Raises an error that is not retryable, or the last one when no delay is left. `notify` gets each
    other error and the delay after it.
    """
    left = iter(delays)
    while True:
        try:
            return attempt()
        except errors as exc:
            if not is_retryable(exc) or (delay := next(left, None)) is None:
                raise
            notify(exc, delay)
        time.sleep(delay)


async def retry_async(
    attempt: Callable[[], Awaitable[T]],
    delays: Iterable[float],
    errors: type[E] | tuple[type[E], ...],
    is_retryable: Callable[[E], bool] = _always,
    *,
    notify: Callable[[E, float], object] = _silently,
) -> T:
    """Return the result of `attempt`, an awaitable; otherwise as `retry`."""
    left = iter(delays)
    while True:
        try:
            return await attempt()
        except errors as exc:
            if not is_retryable(exc) or (delay := next(left, None)) is None:
                raise
            notify(exc, delay)
        await asyncio.sleep(delay)
