"""Rows of a batch that match a search.

The index of each shard lists failed and truncated rows, so that a page of them reads no other
row. All other conditions read rows, up to a limit: the next call continues after the last line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from tidemill.batch.model import Batch
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import SEARCHED_BYTES, StoredRows

from ..aws.sync import Aws
from ..deployment import Deployment
from .part_cache import PartCache, Place
from .results import MAX_BYTES, MAX_RANGES, listed_shards, read_places, shards_behind
from .row_finder import NotIndexed, RowFinder

_MAX_SHARDS: Final = 2048
_CHUNK_BYTES: Final = 2 * 2**20


def search_rows(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    cache: PartCache,
    query: RowQuery,
    *,
    limit: int,
) -> StoredRows:
    """Return the rows that match a query, in line order, at most `limit`.

    Raises WorkGone if the rows have been deleted.
    """
    after = query.after if query.line is None else query.line - 1
    finder, search = RowFinder(aws, deployment, batch, cache), _Search(query, limit)
    shards = islice(shards_behind(aws, deployment, batch, after), _MAX_SHARDS)
    through, num_shards, kinds = after, 0, query.kinds
    for shard, last_line in listed_shards(finder, shards):
        num_shards += 1
        try:
            found = finder.find(shard, kinds) if finder.may_have_rows(shard, kinds) else {}
        except NotIndexed:
            return search.stopped(through)
        for chunk in search.chunks(found, after):
            search.add(chunk, read_places(finder, chunk))
            through = chunk[-1][1].line
            if search.is_full:
                return search.page()
            if search.has_read_enough:
                return search.stopped(through)
        if query.line is not None:
            break
        through = last_line or max(through, shard.first_line + shard.num_rows - 1)
    return search.stopped(through) if num_shards == _MAX_SHARDS else search.ended(through)


@dataclass(slots=True)
class _Search:
    """The matching rows so far, at most one more than a page: then another page follows."""

    query: RowQuery
    limit: int
    rows: list[tuple[int, bytes | None]] = field(default_factory=list)
    _num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Say whether a page and the row after it were found."""
        return len(self.rows) > self.limit

    @property
    def has_read_enough(self) -> bool:
        """Say whether a call may read no more."""
        return self._num_bytes >= SEARCHED_BYTES

    def chunks(
        self, found: Mapping[int, tuple[str, Place]], after: int
    ) -> Iterator[list[tuple[str, Place]]]:
        """Yield the rows of a shard that may match, in line order, as many as are read at once."""
        query, lines = self.query, (line for line in found if line > after)
        wanted = sorted(line for line in lines if query.line in {None, line})
        chunk: list[tuple[str, Place]] = []
        num_bytes = 0
        for line in wanted:
            key, place = found[line]
            chunk.append((key, place))
            size = place.end - place.start
            num_bytes += size if size <= MAX_BYTES else 0
            # Without other conditions each of them matches.
            is_page = not query.reads_rows and len(chunk) + len(self.rows) > self.limit
            if is_page or num_bytes >= _CHUNK_BYTES or len(chunk) == 16 * MAX_RANGES:
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
