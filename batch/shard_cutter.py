"""Cutting a file into shards at line boundaries, limited by lines and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .model import Shard

MAX_SHARD_LINES = 4096
MAX_SHARD_BYTES = 16 * 2**20
# Above this file size shards have more lines, up to this factor: then rows of 330 bytes reach the
# size that S3 copies as one part, and a file has about a thousand shards.
_LARGE_FILE_BYTES = 16 * 2**30
_MAX_GROWTH = 4


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """Limits of a shard, which ends before it would exceed one; a single line may exceed bytes.

    Blank lines count for the first limit, because a shard of them could be as long as the file.
    """

    max_lines: int = MAX_SHARD_LINES
    max_bytes: int = MAX_SHARD_BYTES

    def for_file(self, num_bytes: int) -> ShardLimits:
        """Return the limits for a file of this size: large files have longer shards."""
        growth = min(max(1, num_bytes / _LARGE_FILE_BYTES), _MAX_GROWTH)
        return replace(self, max_lines=int(self.max_lines * growth))


@dataclass(slots=True)
class ShardCutter:
    """Takes the lines of a file one after another, and returns each shard that is full.

    Its fields are its whole state, so that another run can continue from them.
    """

    batch_id: str
    limits: ShardLimits
    number: int = 0
    first_line: int = 1
    start: int = 0
    end: int = 0
    num_rows: int = 0

    def add(self, line: int, start: int, end: int) -> Shard | None:
        """Add the line in bytes `start` to `end`; return the shard that ended before it, if any."""
        is_full = self.num_rows > 0 and (
            line - self.first_line >= self.limits.max_lines
            or end - self.start > self.limits.max_bytes
        )
        shard = self._close() if is_full else None
        if self.num_rows == 0:
            self.first_line, self.start = line, start
        self.num_rows += 1
        self.end = end
        return shard

    def finish(self) -> Shard | None:
        """Return the last shard, or None if every line is already in one."""
        return self._close() if self.num_rows else None

    def _close(self) -> Shard:
        """Return the lines so far, without the blank ones that follow them."""
        shard = Shard(
            self.batch_id, self.number, self.first_line, self.num_rows, self.start, self.end
        )
        self.number += 1
        self.num_rows = 0
        return shard
