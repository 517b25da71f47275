"""Requests of rows: lines of the input, read by the byte range of their shard.

No index of lines is stored. The lines of a shard are counted once, and cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import accumulate
from typing import Final

from tidemill.batch.file.lines import BOM
from tidemill.batch.model import Batch, Shard
from tidemill.batch.parts import RowKind

from ..aws.bucket import read_range
from ..aws.calls import Operation
from ..aws.sync import Aws
from ..deployment import Deployment
from .part_cache import PartCache, PartRows, Place
from .results import shards_behind

READ_BYTES: Final = 32 * 2**20
"""Bytes of the input that one call reads at most: two shards of the largest size."""


def read_requests(
    aws: Aws, deployment: Deployment, batch: Batch, cache: PartCache, lines: Iterable[int]
) -> dict[int, bytes]:
    """Return the requests of lines as far as they are within the limit.

    Raises ObjectChanged or NotThere when the input is no longer there.
    """
    wanted = sorted(lines)
    if not wanted:
        return {}
    room = READ_BYTES
    reads: list[Operation[dict[int, bytes]]] = []
    for shard, own in _by_shard(aws, deployment, batch, cache, wanted):
        known = cache.part(_key_of(shard))
        if known is None:
            if room < (num_bytes := shard.end - shard.start):
                continue
            room -= num_bytes
            reads.append(_read_shard(batch, shard, cache, own))
            continue
        runs: list[list[Place]] = []
        for place in known:
            if place.line in own and place.end - place.start <= room:
                room -= place.end - place.start
                if not runs or runs[-1][-1].end != place.start:
                    runs.append([])
                runs[-1].append(place)
        reads += [_read_run(batch, run) for run in runs]
    found: dict[int, bytes] = {}
    for each in aws.run_all(reads):
        found |= each
    return found


def _by_shard(
    aws: Aws, deployment: Deployment, batch: Batch, cache: PartCache, wanted: list[int]
) -> Iterable[tuple[Shard, frozenset[int]]]:
    """Yield the shards of lines."""
    left = wanted
    for shard, last_line in shards_behind(aws, deployment, batch, cache, wanted[0] - 1):
        own = frozenset(line for line in left if last_line is None or line <= last_line)
        left = [line for line in left if line not in own]
        if own:
            yield shard, own
        if not left:
            return


def _read_shard(
    batch: Batch, shard: Shard, cache: PartCache, wanted: frozenset[int]
) -> Operation[dict[int, bytes]]:
    data = yield from read_range(batch.source, shard.start, shard.end)
    lines = list(BytesIO(data))
    numbers = array("q", range(shard.first_line, shard.first_line + len(lines)))
    ends = array("q", (shard.start + end for end in accumulate(map(len, lines))))
    kinds = bytes([RowKind.WHOLE]) * len(lines)
    cache.put_part(_key_of(shard), PartRows(shard.start, numbers, ends, kinds))
    given = zip(numbers, lines, strict=True)
    return {number: line.removeprefix(BOM) for number, line in given if number in wanted}


def _read_run(batch: Batch, run: Sequence[Place]) -> Operation[dict[int, bytes]]:
    """Return lines that follow each other."""
    first = run[0].start
    data = yield from read_range(batch.source, first, run[-1].end)
    lines = {place.line: data[place.start - first : place.end - first] for place in run}
    return {number: line.removeprefix(BOM) for number, line in lines.items()}


def _key_of(shard: Shard) -> str:
    return f"input/{shard.batch_id}/{shard.number}"
