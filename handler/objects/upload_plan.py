"""How segments become the parts of one multipart upload: the same plan in every run.

S3 takes at most 10,000 parts, and all but the last of at least 5 MiB. A part that is one segment is
copied inside S3; smaller neighbours are joined and sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_PART_BYTES = 5 * 2**20
MAX_PART_BYTES = 5 * 2**30
MAX_PARTS = 10_000

_TARGET_BYTES = 8 * 2**20
# A part below the target is followed by a copy above it, so there may be twice as many, and a last.
_TARGET_PARTS = (MAX_PARTS - 1) // 2


class UploadPart(NamedTuple):
    """Part `number` (from 1) holds the segments `first` to `end` (exclusive)."""

    number: int
    first: int
    end: int
    num_bytes: int

    @property
    def is_copy(self) -> bool:
        """Say whether the part is one segment, which S3 can copy itself."""
        return self.end - self.first == 1


def plan_upload(sizes: Sequence[int]) -> tuple[UploadPart, ...]:
    """Return the parts that hold segments of these sizes (bytes, none 0), in their order."""
    target = max(_TARGET_BYTES, -(-sum(sizes) // _TARGET_PARTS))
    parts: list[UploadPart] = []
    first = num_bytes = 0
    for index, size in enumerate(sizes):
        if num_bytes >= MIN_PART_BYTES and size >= target:
            parts.append(UploadPart(len(parts) + 1, first, index, num_bytes))
            first, num_bytes = index, 0
        num_bytes += size
        if num_bytes >= target:
            parts.append(UploadPart(len(parts) + 1, first, index + 1, num_bytes))
            first, num_bytes = index + 1, 0
    if num_bytes:
        parts.append(UploadPart(len(parts) + 1, first, len(sizes), num_bytes))
    assert len(parts) <= MAX_PARTS, len(parts)
    assert all(part.num_bytes <= MAX_PART_BYTES for part in parts)
    return tuple(parts)
