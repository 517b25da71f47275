"""Engine core: schedules and runs the requests of one task in steps; each step yields events.

Generation is one task. Another (an encoder's vectors, a recording's text) is another class with the
same four methods; the engine's thread knows none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidemill.protocol.contract import EngineStats

from ..scheduling.token_logprobs import NO_LOGPROBS, TokenLogprobs

RequestT_contra = TypeVar("RequestT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT = TypeVar("ResultT")
_ItemT = TypeVar("_ItemT")


class RunningRequest(Protocol[ResultT_co]):
    """A request that runs, known by its identity."""

    def result(self) -> ResultT_co:
        """Return the result of a finished request; raise its `RequestError` if it failed."""


class StepOutput(NamedTuple, Generic[ResultT]):
    """Output of a step for one request: its new token ids since the last one, and its end.

    Each request has one finished output, its last; after that its `result` may be read. Other
    outputs come only for streamed requests, since an event costs more than a token. If logprobs
    were requested, `new_logprobs` has one entry per new token, and the first event has the
    prompt's. Tasks whose results consist of pieces instead of tokens put the next one in `part`.
    """

    request: RunningRequest[ResultT]
    new_token_ids: list[int]
    is_finished: bool
    new_logprobs: TokenLogprobs = NO_LOGPROBS
    prompt_logprobs: TokenLogprobs = NO_LOGPROBS
    part: ResultT | None = None


class EngineCore(Protocol[RequestT_contra, ResultT]):
    """Requests in through `add`, outputs out of `step`; only `stats` is called by other threads."""

    def add(self, request: RequestT_contra) -> RunningRequest[ResultT]:
        """Queue one item; raises `RequestError` if it can never run here."""

    def step(self) -> Sequence[StepOutput[ResultT]] | None:
        """Run one step and return its outputs; None if there is nothing to do."""

    def abort(self, unwanted: AbstractSet[object]) -> None:
        """Drop items at any stage; they yield no more events."""

    def stats(self) -> EngineStats:
        """Return counts of running, waiting and finished work; callable from another thread.

        Raises `EngineError` if no work can be done any more.
        """


class UrgentQueue(Generic[_ItemT]):
    """Interactive items that wait: by priority, the lowest number first, then by arrival."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[_ItemT]] = {}  # by priority, those that are not empty
        self._priorities: list[int] = []  # a heap
        self._length = 0

    def __len__(self) -> int:
        """Return the number of waiting items; callable from another thread."""
        return self._length

    def __iter__(self) -> Iterator[_ItemT]:
        """Yield the items in their order."""
        return chain.from_iterable(self._queues[number] for number in sorted(self._priorities))

    def append(self, priority: int, item: _ItemT) -> None:
        """Queue an item as the last of its priority."""
        self._queue_of(priority).append(item)

    def appendleft(self, priority: int, item: _ItemT) -> None:
        """Queue an item as the first of its priority."""
        self._queue_of(priority).appendleft(item)

    def popleft(self) -> _ItemT:
        """Remove and return the first item; raises IndexError if there is none."""
        first = self._queues[self._priorities[0]]
        item = first.popleft()
        self._length -= 1
        if not first:
            del self._queues[heappop(self._priorities)]
        return item

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove the items that are in `unwanted`."""
        left = {
            number: deque(item for item in queue if item not in unwanted)
            for number, queue in self._queues.items()
        }
        self._queues = {number: queue for number, queue in left.items() if queue}
        self._priorities = sorted(self._queues)
        self._length = sum(map(len, self._queues.values()))

    def _queue_of(self, priority: int) -> deque[_ItemT]:
        """Return the queue of an item that is added now."""
        self._length += 1
        if (queue := self._queues.get(priority)) is None:
            queue = self._queues[priority] = deque()
            heappush(self._priorities, priority)
        return queue
