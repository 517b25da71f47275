"""Shard of a file: a contiguous part of its lines, for one of several runs."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Protocol

_BLOCK_BYTES: Final = 2**20
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number`, from 1, of the `count` shards of a file.

    All shards cover the same number of bytes of the plain JSONL. A line belongs to the shard with
    its first byte, so that each line belongs to exactly one shard, for any count.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count}"

    def path(self, whole: str) -> str:
        """Return the path of the shard's part of an output: `rows.jsonl.3-of-8`."""
        return f"{whole}.{self.number}-of-{self.count}"

    def byte_range(self, num_bytes: int) -> tuple[int, int]:
        """Return the start and the end of the shard in a file of this size."""
        return (
            num_bytes * (self.number - 1) // self.count,
            num_bytes * self.number // self.count,
        )


def parse_shard(text: str) -> Shard:
    """Return the shard of `3/8`; raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid shard: use 3/8 for the third of eight"
        )
    number, count = int(match[1]), int(match[2])
    if not count:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid shard: the number of shards must be at least 1"
        )
    if not 1 <= number <= count:
        shards = "1/1" if count == 1 else f"1/{count} to {count}/{count}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid shard: use {shards}")
    return Shard(number, count)


def add_shard_flag(group: argparse._ActionsContainer, help_text: str) -> None:
    """Add `--shard`."""
    group.add_argument("--shard", type=parse_shard, metavar="I/N", help=help_text)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Boundary before a line of a file, or at its end.

    `start` is the line's first byte, `number` its number, and `digest` the digest of all preceding
    bytes, which shows that shards belong to the same file.
    """

    start: int
    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class ShardLines:
    """Lines of a shard in a file of `num_bytes`, from `first` up to `end`."""

    shard: Shard
    num_bytes: int
    first: Boundary
    end: Boundary


class _Readable(Protocol):
    """A binary file that is read from its start."""

    def seek(self, position: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


def find_shard_lines(file: _Readable, num_bytes: int, shard: Shard) -> ShardLines:
    """Find the lines of a shard by reading the file up to the shard's end, without parsing."""
    file.seek(0)
    reader = _BoundaryReader(file)
    first, end = [reader.find(offset) for offset in shard.byte_range(num_bytes)]
    return ShardLines(shard, num_bytes, first, end)


class _BoundaryReader:
    """Reads a file from its start on, and counts its lines."""

    def __init__(self, file: _Readable) -> None:
        self._file = file
        self._position = 0
        self._number = 1
        self._digest = blake2b(digest_size=_DIGEST_BYTES)

    def find(self, offset: int) -> Boundary:
        """Return the first line that starts at `offset` or later; offsets must not decrease."""
        while self._position < offset - 1:
            data = self._file.read(min(_BLOCK_BYTES, offset - 1 - self._position))
            if not data:
                break
            self._count(data)
        if self._position < offset:
            ends_line = False
            while not ends_line and (data := self._file.readline(_BLOCK_BYTES)):
                self._count(data)
                ends_line = data.endswith(b"\n")
            self._number += not ends_line  # the last line may have no newline
        return Boundary(self._position, self._number, self._digest.hexdigest())

    def _count(self, data: bytes) -> None:
        self._position += len(data)
        self._number += data.count(b"\n")
        self._digest.update(data)
