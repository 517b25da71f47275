"""One page of finished rows, within its limits, and the line up to which it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final, NamedTuple

from tidemill.batch.model import Batch, Shard

from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from .part_cache import PartCache, Place, ShardPage
from .row_finder import ByteRange, NotIndexed, RowFinder, WorkGone

MAX_BYTES: Final = 4_000_000
# Rows of neighbouring lines may be in many parts: each range is a separate request.
MAX_RANGES: Final = 256
_MAX_GAP_BYTES = 2**15
_NUM_LISTED_AT_ONCE = 8
_NUM_PROBES = 8
_MAX_RANGE_BYTES = 2**21
_NUM_READ_AT_ONCE = 64


class Results(NamedTuple):
    """Rows with their line numbers; None replaces a row larger than a response may be.

    All lines up to `complete_through` have their row here, or will never have one.
    """

    rows: list[tuple[int, bytes | None]]
    complete_through: int
    has_more: bool


@dataclass(slots=True)
class _Selection:
    """The rows of the page, as far as there is room."""

    limit: int
    places: list[tuple[str, Place]] = field(default_factory=list)
    _num_bytes: int = 0
    _num_ranges: int = 0
    _ends: dict[str, int] = field(default_factory=dict)

    def add_all(self, wanted: Sequence[tuple[str, Place]]) -> list[int]:
        """Add rows until the page is full; return the lines of the added rows."""
        return [place.line for key, place in takewhile(lambda row: self._add(*row), wanted)]

    def _add(self, key: str, place: Place) -> bool:
        """Add one row; False if there is no room for it."""
        size = place.end - place.start
        size = 0 if size > MAX_BYTES else size
        end = self._ends.get(key)
        is_near = end is not None and place.start - end <= _MAX_GAP_BYTES
        num_ranges = self._num_ranges + (not is_near)
        is_full = (
            len(self.places) >= self.limit
            or self._num_bytes + size > MAX_BYTES
            or num_ranges > MAX_RANGES
        )
        if is_full:
            return False
        self.places.append((key, place))
        self._num_bytes += size
        if size:
            self._num_ranges = num_ranges
            self._ends[key] = place.end
        return True


@dataclass(slots=True)
class _CompletePrefix:
    """The line up to which all rows are returned: grows shard by shard, until a line has none."""

    through: int
    _is_broken: bool = False

    def extend(
        self, first_line: int, last_line: int, given: Sequence[int], *, is_whole: bool, is_cut: bool
    ) -> None:
        """Add the returned lines of the next shard.

        `is_whole` means that no other row will come, `is_cut` that there was no room for the last
        of them.
        """
        if self._is_broken:
            return
        self.through = max(self.through, first_line - 1)
        if is_whole:
            self.through = max([self.through, *given[-1:]]) if is_cut else last_line
        else:
            for line in given:
                if line != self.through + 1:
                    break
                self.through = line
        self._is_broken = is_cut or not is_whole


def read_results(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    cache: PartCache,
    *,
    after_line: int,
    limit: int,
) -> Results:
    """Return the finished rows after a line, in line order, at most `limit`.

    Raises WorkGone if they have been deleted, and NotIndexed if another call will find them.
    """
    finder, picks = RowFinder(aws, deployment, batch, cache), _Selection(limit)
    reach = _CompletePrefix(after_line)
    has_more = False
    for shard, last_line in listed_shards(
        finder, shards_behind(aws, deployment, batch, cache, after_line)
    ):
        try:
            found = finder.find(shard) if finder.may_have_rows(shard) else {}
        except NotIndexed:
            if not picks.places:
                raise
            has_more = True
            break
        wanted = sorted(line for line in found if line > after_line)
        given = picks.add_all([found[line] for line in wanted])
        has_more = len(given) < len(wanted)
        reach.extend(
            shard.first_line,
            last_line or max([shard.first_line + shard.num_rows - 1, *wanted]),
            given,
            is_whole=batch.is_terminal or len(found) >= shard.num_rows,
            is_cut=has_more,
        )
        if has_more:
            break
    return Results(read_places(finder, picks.places), reach.through, has_more)


def shards_behind(
    aws: Aws, deployment: Deployment, batch: Batch, cache: PartCache, after_line: int
) -> Iterator[tuple[Shard, int | None]]:
    """Yield the shards that end after a line, and the last line of each.

    Lines between shards are blank and count to the one before; the end of the last is unknown.
    """
    if not batch.num_shards:
        return
    table, before = deployment.table, None
    listed = cache.shards(batch, after_line + 1)
    if listed is None:
        listed = _first_page(aws, deployment, batch, after_line)
        cache.put_shards(batch, listed)
    shards, following = listed
    while True:
        for shard in shards:
            if before is not None and shard.first_line - 1 > after_line:
                yield before, shard.first_line - 1
            before = shard
        if following is None:
            break
        listing = table.list_shards_page(batch.id, following, _NUM_READ_AT_ONCE)
        shards, following = aws.run(listing)
    if before is not None:
        yield before, None


def _first_page(aws: Aws, deployment: Deployment, batch: Batch, after_line: int) -> ShardPage:
    """Return a page of shards, the first of which begins before the next line.

    It is first looked for where it is if all shards have as many lines.
    """
    table, line = deployment.table, after_line + 1
    share = min(1.0, after_line / max(1, batch.num_rows))
    guess = max(0, round(share * batch.num_shards) - _NUM_READ_AT_ONCE // 2)
    page = ShardPage(*aws.run(table.list_shards_page(batch.id, guess, _NUM_READ_AT_ONCE)))
    if guess and not page.contains(line):
        number = _find_first(aws, deployment, batch, after_line)
        page = ShardPage(*aws.run(table.list_shards_page(batch.id, number, _NUM_READ_AT_ONCE)))
    return page


def _find_first(aws: Aws, deployment: Deployment, batch: Batch, after_line: int) -> int:
    """Return the number of a shard that begins before the next line, by at most a few shards."""
    low, high = 0, batch.num_shards - 1
    while high - low >= _NUM_READ_AT_ONCE:
        step = (high - low) / (_NUM_PROBES + 1)
        numbers = [low + round(step * place) for place in range(1, _NUM_PROBES + 1)]
        probes = aws.run_all(deployment.table.get_shard(batch.id, each) for each in numbers)
        for number, shard in zip(numbers, probes, strict=True):
            if shard is None or shard.first_line > after_line + 1:
                high = number - 1
                break
            low = number
    return low


def listed_shards(
    finder: RowFinder, shards: Iterator[tuple[Shard, int | None]]
) -> Iterator[tuple[Shard, int | None]]:
    """Yield the shards and their last lines, once their objects are listed."""
    num_at_once = 1  # one reply rarely needs two
    while some := list(islice(shards, num_at_once)):
        finder.list_objects([shard for shard, _ in some if finder.may_have_rows(shard)])
        yield from some
        num_at_once = _NUM_LISTED_AT_ONCE


def read_places(
    finder: RowFinder, places: Sequence[tuple[str, Place]]
) -> list[tuple[int, bytes | None]]:
    """Return the rows at these places; neighbouring rows are read together."""
    ranges: list[list[tuple[str, Place]]] = []
    open_ranges: dict[str, list[tuple[str, Place]]] = {}
    for key, place in places:
        if place.end - place.start > MAX_BYTES:
            continue
        near = open_ranges.get(key)
        is_far = near is None or place.start - near[-1][1].end > _MAX_GAP_BYTES
        # Long ranges are read in several concurrent calls.
        if near is None or is_far or place.end - near[0][1].start > _MAX_RANGE_BYTES:
            near = open_ranges[key] = []
            ranges.append(near)
        near.append((key, place))
    wanted = [ByteRange(near[0][0], near[0][1].start, near[-1][1].end) for near in ranges]
    try:
        bodies = finder.read(wanted)
    except NotThere as exc:
        raise WorkGone(str(exc)) from exc
    rows: dict[int, bytes] = {}
    for near, body in zip(ranges, bodies, strict=True):
        first = near[0][1].start
        for _, place in near:
            rows[place.line] = body[place.start - first : place.end - first]
    return [(place.line, rows.get(place.line)) for _, place in places]
