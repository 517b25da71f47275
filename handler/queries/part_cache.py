"""Part cache: row places of parts and segments, which are immutable, for one process."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from threading import Lock
from typing import Final, NamedTuple, Self

from tidemill.batch.model import Batch, Shard
from tidemill.batch.parts import RowKind, RowPlace

_MAX_SHARD_PAGES: Final = 32


class Place(NamedTuple):
    """Bytes `start` to `end` (exclusive) of an object contain the row of a line."""

    line: int
    start: int
    end: int
    kind: RowKind = RowKind.WHOLE


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of one object in line order: contiguous from byte `start` on."""

    start: int
    lines: array[int]
    ends: array[int]
    kinds: bytes

    @classmethod
    def from_part(cls, places: Sequence[RowPlace]) -> Self:
        """Return the cache entry for a part."""
        lines = array("q", (place.line for place in places))
        ends = array("q", (place.end for place in places))
        return cls(places[0].start if places else 0, lines, ends, bytes(map(_kind_of, places)))

    @classmethod
    def from_segment(
        cls,
        rows: Sequence[tuple[int, int]],
        kind: RowKind,
        truncated: Collection[int] = (),
        *,
        start: int = 0,
    ) -> Self:
        """Return the cache entry for a segment, from line and bytes of each row."""
        lines = array("q", (line for line, _ in rows))
        kinds = bytes(RowKind.TRUNCATED if line in truncated else kind for line in lines)
        ends = accumulate((num_bytes for _, num_bytes in rows), initial=start)
        return cls(start, lines, array("q", islice(ends, 1, None)), kinds)

    def of_kinds(self, kinds: Collection[int]) -> Iterator[Place]:
        """Yield the rows of some kinds."""
        for at, kind in enumerate(self.kinds):
            if kind in kinds:
                start = self.ends[at - 1] if at else self.start
                yield Place(self.lines[at], start, self.ends[at], _KINDS[kind])

    def __iter__(self) -> Iterator[Place]:
        start = self.start
        for line, end, kind in zip(self.lines, self.ends, self.kinds, strict=True):
            yield Place(line, start, end, _KINDS[kind])
            start = end


class ShardPage(NamedTuple):
    """Shards of a batch in order, and the number of the shard after them."""

    shards: list[Shard]
    following: int | None

    def contains(self, line: int) -> bool:
        """Say whether the shard of a line is among them."""
        if not self.shards:
            return False
        is_before = self.shards[0].number == 0 or self.shards[0].first_line <= line
        return is_before and (self.following is None or line < self.shards[-1].first_line)


class PartCache:
    """LRU cache of objects by key, bounded by their number of rows, and of shards; thread-safe."""

    def __init__(self, max_rows: int = 1_000_000) -> None:
        self._max_rows = max_rows
        self._num_rows = 0
        self._parts: OrderedDict[str, PartRows] = OrderedDict()
        self._lock = Lock()
        self._pages: deque[tuple[str, int | None, ShardPage]] = deque(maxlen=_MAX_SHARD_PAGES)

    def part(self, key: str) -> PartRows | None:
        """Return the cached entry of a part, or None."""
        with self._lock:
            if key in self._parts:
                self._parts.move_to_end(key)
            return self._parts.get(key)

    def put_part(self, key: str, rows: PartRows) -> None:
        """Cache the entry of a part."""
        with self._lock:
            self._forget(key)
            self._parts[key] = rows
            self._num_rows += _weight(rows)
            while self._num_rows > self._max_rows and len(self._parts) > 1:
                self._forget(next(iter(self._parts)))

    def shards(self, batch: Batch, line: int) -> ShardPage | None:
        """Return a page with the shard of a line, or None."""
        with self._lock:
            own = [page for *key, page in self._pages if key == [batch.id, batch.created_ns]]
        return next((page for page in own if page.contains(line)), None)

    def put_shards(self, batch: Batch, page: ShardPage) -> None:
        """Cache shards if their batch has ended, because they do not change any more."""
        if batch.is_terminal:
            with self._lock:
                self._pages.append((batch.id, batch.created_ns, page))

    def _forget(self, key: str) -> None:
        rows = self._parts.pop(key, None)
        self._num_rows -= _weight(rows) if rows is not None else 0


_KINDS = tuple(RowKind)


def _kind_of(place: RowPlace) -> RowKind:
    if not place.is_success:
        return RowKind.FAILED
    return RowKind.TRUNCATED if place.is_truncated else RowKind.WHOLE


def _weight(rows: PartRows) -> int:
    """Return an entry's cost in rows: even an entry with few rows has a minimum cost."""
    return len(rows.lines) + 32
