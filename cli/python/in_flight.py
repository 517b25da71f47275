"""Requests in flight, and their answers in order or as they come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import Generic, TypeVar

from .errors import RequestFailed

_Answer = TypeVar("_Answer")


class InFlight(Generic[_Answer]):
    """Requests in flight; `notify` is called, in any thread, once one of them is answered."""

    def __init__(self, notify: Callable[[], object], *, in_order: bool) -> None:
        self._notify = notify
        self._in_order = in_order
        self._places = count()
        self._next = 0
        self._futures: dict[int, Future[_Answer]] = {}
        self._answered: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, future: Future[_Answer]) -> None:
        """Add the next request."""
        place = next(self._places)
        self._futures[place] = future
        future.add_done_callback(lambda _: self._note(place))

    def take(self) -> Iterator[tuple[int, _Answer | RequestFailed]]:
        """Remove and yield what is there, by its place; raises EngineDied."""
        while self._answered and not self._in_order:
            place = self._answered.popleft()
            yield place, self._pop(place)
        while self._in_order and self._next in self._futures and self._futures[self._next].done():
            self._next += 1
            yield self._next - 1, self._pop(self._next - 1)

    def cancel(self) -> None:
        """End what nobody waits for any more."""
        for future in self._futures.values():
            future.cancel()

    def _note(self, place: int) -> None:
        if not self._in_order:
            self._answered.append(place)
        self._notify()

    def _pop(self, place: int) -> _Answer | RequestFailed:
        future = self._futures.pop(place)
        error = future.exception()
        return error if isinstance(error, RequestFailed) else future.result()


def answers_to(
    requests: Iterable[Future[_Answer]], limit: int, *, in_order: bool
) -> Iterator[tuple[int, _Answer | RequestFailed]]:
    """Yield the answers to requests, which are sent as they are taken: no more than `limit`."""
    answered = threading.Event()
    running = InFlight[_Answer](answered.set, in_order=in_order)
    try:
        for request in requests:
            running.add(request)
            yield from running.take()
            while len(running) >= limit:
                answered.wait()
                answered.clear()
                yield from running.take()
        while running:
            answered.wait()
            answered.clear()
            yield from running.take()
    finally:
        running.cancel()
