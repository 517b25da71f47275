"""Finds repeated custom ids in files of any length with flat memory.

Each id costs 16 bytes of a temporary file: 10 of its hash and 6 of its line number. One more byte
of the hash chooses the partition, so that 88 bits have to agree before two ids are taken for one.
"""

from __future__ import annotations

import heapq
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Protocol, Self

_NUM_PARTITIONS = 256
_HASH_BYTES = 10
_NUMBER_BYTES = 6
_RECORD_BYTES = _HASH_BYTES + _NUMBER_BYTES
_BLOCK_BYTES = 256 * _RECORD_BYTES
_LENGTH_BYTES = 8


class Duplicate(NamedTuple):
    """`line` repeats the custom id that `first_line` was the first to have."""

    line: int
    first_line: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """How many lines repeat an id, and the first of them in the order of the file."""

    count: int
    first: tuple[Duplicate, ...]


class ByteReader(Protocol):
    """A stream of bytes; an open file is one."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none only at the end."""


class DuplicateFinder:
    """Takes the custom id of each line, then tells which are repeated.

    A context manager: its temporary file, made in `folder` once the ids no longer fit in a
    megabyte, goes when it is left.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._num_blocks = 0
        # Of each partition: the block being filled, and the numbers of those in the file.
        self._tails = [bytearray() for _ in range(_NUM_PARTITIONS)]
        self._blocks = [array("Q") for _ in range(_NUM_PARTITIONS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, custom_id: str, line: int) -> None:
        """Take the custom id of a line; lines come in the order of the file."""
        digest = blake2b(
            custom_id.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES + 1
        ).digest()
        tail = self._tails[digest[0]]
        tail += digest[1:]
        tail += line.to_bytes(_NUMBER_BYTES, "little")
        if len(tail) == _BLOCK_BYTES:
            self._spill(digest[0])

    def _spill(self, partition: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - until left
        self._file.write(self._tails[partition])
        self._tails[partition].clear()
        self._blocks[partition].append(self._num_blocks)
        self._num_blocks += 1

    def save(self, stream: IO[bytes]) -> None:
        """Write all ids, for `load` of another finder: the bytes of each partition, then theirs."""
        for partition in range(_NUM_PARTITIONS):
            num_bytes = len(self._blocks[partition]) * _BLOCK_BYTES + len(self._tails[partition])
            stream.write(num_bytes.to_bytes(_LENGTH_BYTES, "little"))
        for partition in range(_NUM_PARTITIONS):
            for block in self._read_blocks(partition):
                stream.write(block)

    def load(self, stream: ByteReader) -> None:
        """Take the ids that `save` wrote, all of lines after those that are here already.

        Raises ValueError when they are not complete.
        """
        lengths = _read_exactly(stream, _NUM_PARTITIONS * _LENGTH_BYTES)
        for partition in range(_NUM_PARTITIONS):
            start = partition * _LENGTH_BYTES
            left = int.from_bytes(lengths[start : start + _LENGTH_BYTES], "little")
            tail = self._tails[partition]
            while left:
                # What was a block there need not be one here: the tail may be begun.
                piece = _read_exactly(stream, min(left, _BLOCK_BYTES - len(tail)))
                tail += piece
                left -= len(piece)
                if len(tail) == _BLOCK_BYTES:
                    self._spill(partition)

    def find(self, limit: int = 100) -> Duplicates:
        """Return the number of lines that repeat an id, and the first `limit` of them."""
        count = 0
        first: list[Duplicate] = []
        for partition in range(_NUM_PARTITIONS):
            # In the order of the file, so that those after the first `limit` need no keeping.
            found = self._find_in(partition)
            candidates = list(islice(found, limit))
            count += len(candidates) + sum(1 for _ in found)
            first = heapq.nsmallest(limit, [*first, *candidates])
        return Duplicates(count, tuple(first))

    def _find_in(self, partition: int) -> Iterator[Duplicate]:
        first_lines: dict[bytes, int] = {}
        for block in self._read_blocks(partition):
            for start in range(0, len(block), _RECORD_BYTES):
                middle = start + _HASH_BYTES
                line = int.from_bytes(block[middle : start + _RECORD_BYTES], "little")
                first_line = first_lines.setdefault(block[start:middle], line)
                if first_line != line:
                    yield Duplicate(line, first_line)

    def _read_blocks(self, partition: int) -> Iterator[bytes]:
        if self._file is not None:
            for number in self._blocks[partition]:
                self._file.seek(number * _BLOCK_BYTES)
                yield self._file.read(_BLOCK_BYTES)
            self._file.seek(self._num_blocks * _BLOCK_BYTES)
        yield bytes(self._tails[partition])


def _read_exactly(stream: ByteReader, num_bytes: int) -> bytes:
    pieces = []
    while num_bytes:
        piece = stream.read(num_bytes)
        if not piece:
            raise ValueError(f"the saved ids end {num_bytes:,} bytes too early")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
