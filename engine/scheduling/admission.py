"""Admission policies: queues that choose the waiting sequence that starts next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from collections.abc import Set as AbstractSet
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeVar

from .images import prompt_key
from .sequence import Sequence

_ItemT = TypeVar("_ItemT")
_QueueT = TypeVar("_QueueT", bound=Sized)


class Admission(Protocol):
    """A queue of waiting sequences; its length is their number.

    Every order is safe: the running sequence that started first keeps its pages to its end. The
    same holds for rows of files once no urgent sequences arrive.
    """

    def __len__(self) -> int:
        """Return the number of waiting sequences."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has just arrived."""

    def requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, which has lost its pages."""

    def peek(self) -> Sequence | None:
        """Return the next to start, the same until the queue changes; None if it is empty."""

    def pop(self) -> Sequence:
        """Remove what `peek` returned, which starts now, and return it."""

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove waiting sequences that are in `unwanted`."""


class ArrivalOrder:
    """First come, first served; a preempted sequence returns to its old place."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence after all that arrived before it."""
        heappush(self._heap, (sequence.arrival, sequence))

    requeue = add

    def peek(self) -> Sequence | None:
        """Return the one that arrived first."""
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return the one that arrived first."""
        return heappop(self._heap)[1]

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove waiting sequences that are in `unwanted`."""
        self._heap = [entry for entry in self._heap if entry[1] not in unwanted]
        heapify(self._heap)


class RoundRobin:
    """Takes one sequence of each request in turn; those of one request start in order of arrival.

    A request without running sequences (by `num_running_of` and its id) comes before all others,
    so that each makes progress, regardless of how many sequences another has.
    """

    def __init__(self, num_running_of: Mapping[str, int]) -> None:
        self._num_running_of = num_running_of
        self._queues: dict[str, ArrivalOrder] = {}  # by request id, the longest-waiting first
        self._first_id = ""  # of the sequence that `peek` returned, which may run by now
        self._length = 0

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return self._length

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence after those of its request; a new request has the last turn."""
        self._queues.setdefault(sequence.request.request_id, ArrivalOrder()).add(sequence)
        self._length += 1

    requeue = add

    def peek(self) -> Sequence | None:
        """Return the next of the request whose turn it is."""
        if not self._queues:
            return None
        idle = (name for name in self._queues if name not in self._num_running_of)
        self._first_id = next(idle, next(iter(self._queues)))
        return self._queues[self._first_id].peek()

    def pop(self) -> Sequence:
        """Remove what `peek` returned, and return it; its request has the last turn now."""
        queue = self._queues.pop(self._first_id)
        if len(queue) > 1:
            self._queues[self._first_id] = queue
        self._length -= 1
        return queue.pop()

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove waiting sequences that are in `unwanted`."""
        for queue in self._queues.values():
            queue.remove(unwanted)
        self._queues = {name: queue for name, queue in self._queues.items() if len(queue)}
        self._length = sum(map(len, self._queues.values()))


class PrefixOrder:
    """Prompts with a common prefix start one after another, to share pages of the prefix cache.

    It works in rounds: the sequences that wait at a round's start run in the order of their
    prompts, and among equal prompts the longest first. Later arrivals join if their place is still
    ahead, but at most as many as the round began with, so none is overtaken for longer than one
    round. A preempted sequence starts before all others.
    """

    def __init__(self) -> None:
        self._returned = ArrivalOrder()
        self._round: list[tuple[_PromptKey, Sequence]] = []  # a heap
        self._later: list[tuple[_PromptKey, Sequence]] = []
        self._num_joining = 0  # that may still join this round
        self._last: _PromptKey | None = None  # that this round has started

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._returned) + len(self._round) + len(self._later)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence for this round or the next."""
        key = _PromptKey.from_sequence(sequence)
        if self._num_joining and self._last is not None and key > self._last:
            self._num_joining -= 1
            heappush(self._round, (key, sequence))
        else:
            self._later.append((key, sequence))

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence before all sequences that have not run yet."""
        self._returned.add(sequence)

    def peek(self) -> Sequence | None:
        """Return the next of this round, and begin another one at its end."""
        if len(self._returned):
            return self._returned.peek()
        if not self._round:
            self._round, self._later = self._later, []
            heapify(self._round)
            self._num_joining, self._last = len(self._round), None
        return self._round[0][1] if self._round else None

    def pop(self) -> Sequence:
        """Remove what `peek` returned, and return it."""
        if len(self._returned):
            return self._returned.pop()
        self._last, sequence = heappop(self._round)
        return sequence

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove waiting sequences that are in `unwanted`."""
        self._returned.remove(unwanted)
        self._round = [entry for entry in self._round if entry[1] not in unwanted]
        heapify(self._round)
        self._later = [entry for entry in self._later if entry[1] not in unwanted]


class PriorityQueues(Generic[_QueueT]):
    """Queues by priority, the lowest number first; `new` makes one, and empty ones are dropped."""

    def __init__(self, new: Callable[[], _QueueT]) -> None:
        self._new = new
        self._queues: dict[int, _QueueT] = {}
        self._priorities: list[int] = []  # a heap
        self._length = 0

    def __len__(self) -> int:
        """Return the number of items in all queues; callable from another thread."""
        return self._length

    def queue_for(self, priority: int) -> _QueueT:
        """Return the queue of one item that the caller adds now."""
        self._length += 1
        if (queue := self._queues.get(priority)) is None:
            queue = self._queues[priority] = self._new()
            heappush(self._priorities, priority)
        return queue

    def first(self) -> _QueueT:
        """Return the queue of the lowest number; raises IndexError if nothing waits."""
        return self._queues[self._priorities[0]]

    def note_removed(self) -> None:
        """Count one item that the caller has removed from the first queue."""
        self._length -= 1
        if not len(self.first()):
            del self._queues[heappop(self._priorities)]

    def in_order(self) -> Iterator[_QueueT]:
        """Yield the queues in the order of their numbers."""
        return (self._queues[number] for number in sorted(self._priorities))

    def replace(self, left_of: Callable[[_QueueT], _QueueT]) -> None:
        """Replace each queue by the rest that `left_of` returns."""
        queues = {number: left_of(queue) for number, queue in self._queues.items()}
        self._queues = {number: queue for number, queue in queues.items() if len(queue)}
        self._priorities = sorted(self._queues)
        self._length = sum(map(len, self._queues.values()))


class UrgentQueue(PriorityQueues["deque[_ItemT]"], Generic[_ItemT]):
    """Interactive items that wait: by priority, then by arrival, as a deque."""

    def __init__(self) -> None:
        super().__init__(deque)

    def __iter__(self) -> Iterator[_ItemT]:
        """Yield the items in their order."""
        return chain.from_iterable(self.in_order())

    def append(self, priority: int, item: _ItemT) -> None:
        """Queue an item as the last of its priority."""
        self.queue_for(priority).append(item)

    def appendleft(self, priority: int, item: _ItemT) -> None:
        """Queue an item as the first of its priority."""
        self.queue_for(priority).appendleft(item)

    def popleft(self) -> _ItemT:
        """Remove and return the first item; raises IndexError if there is none."""
        item = self.first().popleft()
        self.note_removed()
        return item

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove the items that are in `unwanted`."""
        self.replace(lambda queue: deque(item for item in queue if item not in unwanted))


class UrgentFirst:
    """Interactive sequences first, by priority and in turn by request; then rows, by a policy.

    All interactive sequences start before any row of a file. `num_running_of` belongs to the table.
    """

    def __init__(self, lines: Admission, num_running_of: Mapping[str, int] | None = None) -> None:
        running = {} if num_running_of is None else num_running_of
        self._urgent = PriorityQueues(lambda: RoundRobin(running))
        self._lines = lines

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._urgent) + len(self._lines)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence with others of its kind."""
        priority = sequence.request.priority
        (self._lines if priority is None else self._urgent.queue_for(priority)).add(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence again with others of its kind."""
        priority = sequence.request.priority
        (self._lines if priority is None else self._urgent.queue_for(priority)).requeue(sequence)

    def peek(self) -> Sequence | None:
        """Return the next interactive sequence, or else the next row of a file."""
        return (self._urgent.first() if self._urgent else self._lines).peek()

    def pop(self) -> Sequence:
        """Remove what `peek` returned, and return it."""
        if not self._urgent:
            return self._lines.pop()
        sequence = self._urgent.first().pop()
        self._urgent.note_removed()
        return sequence

    def remove(self, unwanted: AbstractSet[object]) -> None:
        """Remove waiting sequences that are in `unwanted`."""

        def left_of(queue: RoundRobin) -> RoundRobin:
            queue.remove(unwanted)
            return queue

        self._urgent.replace(left_of)
        self._lines.remove(unwanted)


class _PromptKey(NamedTuple):
    """Sort key of the sequences of a round; keys are unique."""

    adapter: int
    cache_salt: str
    prompt: bytes
    fewer_tokens: int
    arrival: int

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> _PromptKey:
        """Return the key of a sequence."""
        request = sequence.request
        return cls(
            request.adapter,
            request.cache_salt,
            prompt_key(sequence.prompt, request.images),
            -request.max_tokens,
            sequence.arrival,
        )
