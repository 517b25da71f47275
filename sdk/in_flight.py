"""Requests in flight, and their answers in order or as they finish."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from .errors import RequestFailed

MAX_INFLIGHT_BYTES: Final = 64 * 2**20

MAX_WAIT_SECONDS: Final = 1.0
"""Time after which a waiting caller looks for answers whose notification failed."""

_Answer = TypeVar("_Answer")


class Sent(NamedTuple, Generic[_Answer]):
    """A request that was sent: the future of its answer, and its size."""

    future: Future[_Answer]
    num_bytes: int


class InFlight(Generic[_Answer]):
    """Requests in flight: at most `limit`, and fewer if their bodies are large.

    `notify` is called, in any thread, when one of them is answered.
    """

    def __init__(self, limit: int, notify: Callable[[], object], *, in_order: bool) -> None:
        self._limit = limit
        self._notify = notify
        self._in_order = in_order
        self._places = count()
        self._next = 0
        self._num_bytes = 0
        self._sent: dict[int, Sent[_Answer]] = {}
        self._place_of: dict[Future[_Answer], int] = {}
        self._answered: deque[Future[_Answer]] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent)

    @property
    def is_full(self) -> bool:
        """Return whether the next request has to wait for an answer."""
        return len(self._sent) >= self._limit or self._num_bytes >= MAX_INFLIGHT_BYTES

    def add(self, sent: Sent[_Answer]) -> None:
        """Add the next request."""
        place = next(self._places)
        self._sent[place] = sent
        self._num_bytes += sent.num_bytes
        if not self._in_order:
            self._place_of[sent.future] = place
            sent.future.add_done_callback(self._answered.append)
        # A future ignores an exception here, such as one for lack of memory: see MAX_WAIT_SECONDS.
        sent.future.add_done_callback(self._wake)

    def take(self) -> Iterator[tuple[int, _Answer | RequestFailed]]:
        """Remove and yield the available answers with their positions; raises EngineDied."""
        while self._answered and not self._in_order:
            place = self._place_of.pop(self._answered.popleft())
            yield place, self._pop(place)
        while self._in_order and self._next in self._sent and self._sent[self._next].future.done():
            self._next += 1
            yield self._next - 1, self._pop(self._next - 1)

    def cancel(self) -> None:
        """Cancel the requests that are still in flight."""
        for sent in self._sent.values():
            sent.future.cancel()

    def _wake(self, _: Future[_Answer]) -> None:
        self._notify()

    def _pop(self, place: int) -> _Answer | RequestFailed:
        future, num_bytes = self._sent.pop(place)
        self._num_bytes -= num_bytes
        error = future.exception()
        return error if isinstance(error, RequestFailed) else future.result()


def answers_to(
    requests: Iterable[Sent[_Answer]], limit: int, *, in_order: bool
) -> Iterator[tuple[int, _Answer | RequestFailed]]:
    """Yield the answers to requests, which are consumed so that at most `limit` are in flight."""
    answered = threading.Event()
    running = InFlight[_Answer](limit, answered.set, in_order=in_order)
    try:
        for request in requests:
            running.add(request)
            yield from running.take()
            while running.is_full:
                answered.wait(MAX_WAIT_SECONDS)
                answered.clear()
                yield from running.take()
        while running:
            answered.wait(MAX_WAIT_SECONDS)
            answered.clear()
            yield from running.take()
    finally:
        running.cancel()
