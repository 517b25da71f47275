"""Rows of a batch that match a search.

The index of each shard lists failed and truncated rows, so that a page of them reads no other
row. All other conditions read rows, up to a limit: the next call continues after the last line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from tidemill.batch.model import Batch, Shard
from tidemill.batch.parts import RowKind
from tidemill.batch.result_kinds import ERRORS, OUTPUT
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import FOUND_BYTES, SEARCHED_BYTES, StoredRows

from ..aws.sync import Aws
from ..deployment import Deployment
from .part_cache import PartCache, Place
from .results import MAX_BYTES, read_places, shards_behind
from .row_finder import ByteRange, NotIndexed, RowFinder

_MAX_SHARDS: Final = 2048
_FIRST_CHUNK: Final = 2 * 2**20
_NEXT_CHUNK: Final = 7 * 2**20
_ROW_BYTES: Final = 512
"""Size of a row, at least, in the limit of what is read at once: each may need a separate call."""

_GUESSED_BYTES: Final = 2**18
_MAX_GROUP: Final = 16
_FEW_ROWS: Final = 1000


def search_rows(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    cache: PartCache,
    query: RowQuery,
    *,
    limit: int,
    max_bytes: int = SEARCHED_BYTES,
) -> StoredRows:
    """Return the rows that match a query, in line order, at most `limit`.

    No more than `max_bytes` of rows are read, and few after `FOUND_BYTES` of those that match.

    Raises WorkGone if the rows have been deleted.
    """
    guess = partial(_guess, query) if limit <= _FEW_ROWS else lambda _: ()
    finder = RowFinder(aws, deployment, batch, cache, guess=guess)
    search = _Search(query, limit, max_bytes)
    shards = islice(shards_behind(aws, deployment, batch, cache, query.begin - 1), _MAX_SHARDS)
    through, num_shards = query.begin - 1, 0
    for group in _groups(finder, shards, query, limit):
        num_shards += len(group)
        finder.load([shard for shard, _ in group if finder.may_have_rows(shard, query.kinds)])
        wanted, end, is_whole = _wanted(finder, group, query, through)
        for chunk in search.chunks(wanted):
            search.add(chunk, read_places(finder, chunk))
            through = chunk[-1][1].line
            if search.is_full:
                return search.page()
            if search.has_read_enough:
                return search.stopped(through)
        through = end
        if not is_whole:
            return search.stopped(through)
        if query.line is not None:
            break
    return search.stopped(through) if num_shards == _MAX_SHARDS else search.ended(through)


def _groups(
    finder: RowFinder, shards: Iterable[tuple[Shard, int | None]], query: RowQuery, limit: int
) -> Iterator[list[tuple[Shard, int | None]]]:
    """Yield shards that are read at once, as many as a page probably needs."""
    group: list[tuple[Shard, int | None]] = []
    num_expected, num_matching, num_needed = 0, 0, limit + 1
    if query.reads_rows:
        num_needed = SEARCHED_BYTES
    for shard, last_line in shards:
        group.append((shard, last_line))
        if finder.may_have_rows(shard, query.kinds):
            num_matching += 1
            num_expected += _expected(shard, query)
        is_enough = num_expected >= num_needed or num_matching == _MAX_GROUP
        if query.line is not None or is_enough:
            yield group
            group, num_expected, num_matching = [], 0, 0
    if group:
        yield group


def _expected(shard: Shard, query: RowQuery) -> int:
    """Return how many rows of a shard match, or its bytes if they have to be read."""
    if query.reads_rows:
        return sum((*shard.output_sizes, *shard.error_sizes))
    done = shard.progress
    by_status = {"failed": done.failed, "truncated": done.truncated}
    # The first shard may end soon after the first line.
    return by_status.get(query.status, min(done.completed + done.failed, _FEW_ROWS))


def _guess(query: RowQuery, shard: Shard) -> Iterator[ByteRange]:
    """Yield the bytes of a shard that begin with the first matching row if all are of one size."""
    if query.reads_rows:
        return
    share = min(1.0, max(0, query.begin - shard.first_line) / max(1, shard.num_rows))
    for kind in (OUTPUT, ERRORS):
        own = query.kinds & {RowKind.FAILED} if kind is ERRORS else query.kinds - {RowKind.FAILED}
        segments = kind.segments_of(shard)
        if not own or len(segments) != 1:
            continue
        [(key, size)] = segments
        start = 0
        if size > _GUESSED_BYTES:
            if RowKind.WHOLE not in query.kinds and kind is OUTPUT:
                continue  # truncated rows may be anywhere
            start = max(0, min(size, round(share * size)) - _GUESSED_BYTES // 2 * (share > 0))
        yield ByteRange(key, start, min(size, start + _GUESSED_BYTES))


def _wanted(
    finder: RowFinder, group: Iterable[tuple[Shard, int | None]], query: RowQuery, through: int
) -> tuple[list[tuple[str, Place]], int, bool]:
    """Return the places of rows that may match, in line order.

    The others are the last line of the group and whether all of its shards are indexed.
    """
    wanted: list[tuple[str, Place]] = []
    end = through
    for shard, last_line in group:
        try:
            may_match = finder.may_have_rows(shard, query.kinds)
            found = finder.find(shard, query.kinds) if may_match else {}
        except NotIndexed:
            return wanted, end, False
        lines = sorted(line for line in found if line > through)
        wanted += [found[line] for line in lines if query.line in {None, line}]
        end = last_line or max(end, shard.first_line + shard.num_rows - 1)
    return wanted, end, True


@dataclass(slots=True)
class _Search:
    """The matching rows so far, at most one more than a page: then another page follows."""

    query: RowQuery
    limit: int
    max_bytes: int
    rows: list[tuple[int, bytes | None]] = field(default_factory=list)
    _num_bytes: int = 0
    _found_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Say whether a page and the row after it were found."""
        return len(self.rows) > self.limit

    @property
    def has_read_enough(self) -> bool:
        """Say whether a call may read no more."""
        return self._num_bytes >= self.max_bytes or self._found_bytes >= FOUND_BYTES

    def chunks(self, wanted: Sequence[tuple[str, Place]]) -> Iterator[list[tuple[str, Place]]]:
        """Yield the rows that may match, as many as are read at once."""
        chunk: list[tuple[str, Place]] = []
        num_bytes = 0
        for key, place in wanted:
            chunk.append((key, place))
            size = place.end - place.start
            num_bytes += size if size <= MAX_BYTES else 0
            # Without other conditions each of them matches.
            is_page = not self.query.reads_rows and len(chunk) + len(self.rows) > self.limit
            is_sparse = self._num_bytes and not self._found_bytes
            most = _NEXT_CHUNK if is_sparse else _FIRST_CHUNK
            most = min(most, self.max_bytes - self._num_bytes)
            if is_page or num_bytes >= most or len(chunk) * _ROW_BYTES >= most:
                self._num_bytes += num_bytes
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            self._num_bytes += num_bytes
            yield chunk

    def add(
        self, chunk: Sequence[tuple[str, Place]], rows: Sequence[tuple[int, bytes | None]]
    ) -> None:
        """Add those rows of a chunk that match; the index may contain their status."""
        self.rows += [
            row
            for (_, place), row in zip(chunk, rows, strict=True)
            if self.query.matches_row(row[1], place.kind)
        ]
        self._found_bytes = sum(len(data or b"") for _, data in self.rows)

    def page(self) -> StoredRows:
        """Return a full page, after which more rows follow."""
        rows = self.rows[: self.limit]
        return StoredRows(rows, rows[-1][0], rows[-1][0])

    def stopped(self, through: int) -> StoredRows:
        """Return the rows up to a line after which the next call continues."""
        return StoredRows(self.rows, through, through)

    def ended(self, through: int) -> StoredRows:
        """Return the last rows."""
        return StoredRows(self.rows, through)
