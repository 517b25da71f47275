"""Upload plan: maps segments to parts of uploads, the same in every run.

S3 allows at most 10,000 parts, and each except the last must have at least 5 MiB. A part within
one segment is copied inside S3. Smaller segments are sent, with as much of their neighbours as
fills a part. Segments for which one upload has no room become larger objects first, group by
group; the last part of each may be small, so that a small segment ends a group and is copied, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tidemill.batch.parts import MAX_PARTS, MIN_COPIED_BYTES


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits of one S3 upload, and the preferred size of a group of segments."""

    min_part_bytes: int = MIN_COPIED_BYTES
    max_parts: int = MAX_PARTS
    group_bytes: int = 512 * 2**20


S3_LIMITS = UploadLimits()


class Piece(NamedTuple):
    """Bytes `start` to `end` (exclusive) of a segment, given by its index."""

    segment: int
    start: int
    end: int


class UploadPart(NamedTuple):
    """Part `number` (from 1), with its pieces in order."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return sum(piece.end - piece.start for piece in self.pieces)

    @property
    def is_copy(self) -> bool:
        """Return whether S3 can copy the part itself."""
        return len(self.pieces) == 1


class Group(NamedTuple):
    """The segments `first` to `end` (exclusive), which begin at byte `start` of the whole."""

    first: int
    end: int
    start: int
    num_bytes: int


def cut_into_parts(pieces: Iterable[bytes], part_bytes: int) -> Iterator[bytes]:
    """Yield the bytes in parts of one size and a shorter last one; without bytes, an empty part."""
    buffer = bytearray()
    is_first = True
    for piece in pieces:
        buffer += piece
        while len(buffer) >= part_bytes:
            yield bytes(buffer[:part_bytes])
            del buffer[:part_bytes]
            is_first = False
    if buffer or is_first:
        yield bytes(buffer)


def plan_upload(sizes: Iterable[int], limits: UploadLimits = S3_LIMITS) -> Iterator[UploadPart]:
    """Yield the parts for segments of these sizes (bytes, none 0), in order."""
    return (
        UploadPart(number, pieces) for number, pieces in enumerate(_cut(sizes, limits), start=1)
    )


def _cut(sizes: Iterable[int], limits: UploadLimits) -> Iterator[tuple[Piece, ...]]:
    small: list[Piece] = []
    num_bytes = 0  # of them, always too few for a part
    for index, size in enumerate(sizes):
        missing = limits.min_part_bytes - num_bytes if small else 0
        taken = missing if size - missing >= limits.min_part_bytes else size
        if taken:
            small.append(Piece(index, 0, taken))
            num_bytes += taken
        if num_bytes >= limits.min_part_bytes:
            yield tuple(small)
            small, num_bytes = [], 0
        if taken < size:
            yield (Piece(index, taken, size),)
    if small:
        yield tuple(small)


def plan_groups(sizes: Sequence[int], limits: UploadLimits = S3_LIMITS) -> Iterator[Group]:
    """Yield the groups that become separate objects; none if one upload has room for all.

    There are at most as many as an upload has parts; each but the last is large enough for one.
    """
    if next(islice(plan_upload(sizes, limits), limits.max_parts, None), None) is None:
        return
    total = sum(sizes)
    least = max(limits.min_part_bytes, -(-total // (limits.max_parts - 1)))
    most = max(limits.group_bytes, least)
    first = start = num_bytes = 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= (least if size < limits.min_part_bytes else most):
            yield Group(first, index + 1, start, num_bytes)
            first, start, num_bytes = index + 1, start + num_bytes, 0
    if num_bytes:
        yield Group(first, len(sizes), start, num_bytes)
