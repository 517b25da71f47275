"""Finds repeated custom ids in files of any length with flat memory.

Each id costs 16 bytes of a temporary file: 10 of its hash and 6 of its line number. One more byte
of the hash chooses the partition, so that 88 bits have to agree before two ids are taken for one.
What several finders have saved, of the ranges of a file, is searched share by share: ids of one
share repeat in no other.
"""

from __future__ import annotations

import heapq
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import IO, NamedTuple, Self

NUM_PARTITIONS = 256
_HASH_BYTES = 10
_NUMBER_BYTES = 6
RECORD_BYTES = _HASH_BYTES + _NUMBER_BYTES
_BLOCK_BYTES = 256 * RECORD_BYTES
_RECORD = Struct(f"{_HASH_BYTES}s{_NUMBER_BYTES}s")
# Of one share; in memory an id takes 140 bytes.
_MAX_SHARE_IDS = 2**22


class Duplicate(NamedTuple):
    """`line` repeats the custom id that `first_line` was the first to have."""

    line: int
    first_line: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Number of lines that repeat an id, and the first of them in the order of the file."""

    count: int = 0
    first: tuple[Duplicate, ...] = ()

    def plus(self, found: Iterable[Duplicate], limit: int) -> Duplicates:
        """Return these and others, of which the first `limit` are told."""
        count = self.count

        def counted() -> Iterator[Duplicate]:
            nonlocal count
            for duplicate in found:
                count += 1
                yield duplicate

        first = tuple(heapq.nsmallest(limit, chain(self.first, counted())))
        return Duplicates(count, first)

    def beside(self, others: Duplicates, limit: int) -> Duplicates:
        """Return these and those of another share."""
        first = tuple(sorted((*self.first, *others.first))[:limit])
        return Duplicates(self.count + others.count, first)


@dataclass(frozen=True, slots=True)
class Share:
    """Ids that are searched at once: of partitions `first` to `end`, or of one slice of one."""

    first: int
    end: int
    slice_number: int = 0
    num_slices: int = 1

    @classmethod
    def nth(cls, number: int, num_shares: int) -> Share:
        """Return the `number`th of so many shares, a power of two."""
        if num_shares <= NUM_PARTITIONS:
            step = NUM_PARTITIONS // num_shares
            return cls(number * step, (number + 1) * step)
        partition, slice_number = divmod(number, num_shares // NUM_PARTITIONS)
        return cls(partition, partition + 1, slice_number, num_shares // NUM_PARTITIONS)


def count_shares(num_ids: int) -> int:
    """Return into how many shares so many ids are divided, that one fits in memory."""
    num_full = max(0, num_ids - 1) // _MAX_SHARE_IDS
    return 1 << num_full.bit_length()


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
        self._tails = [bytearray() for _ in range(NUM_PARTITIONS)]
        self._blocks = [array("Q") for _ in range(NUM_PARTITIONS)]

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

    def save(self, stream: IO[bytes]) -> list[int]:
        """Write all ids, those of each partition in a row, and return how many each has."""
        for partition in range(NUM_PARTITIONS):
            for block in self._read_blocks(partition):
                stream.write(block)
        return [
            (len(blocks) * _BLOCK_BYTES + len(tail)) // RECORD_BYTES
            for blocks, tail in zip(self._blocks, self._tails, strict=True)
        ]

    def find(self, limit: int = 100, look: Callable[[], None] = lambda: None) -> Duplicates:
        """Return the number of lines that repeat an id, and the first `limit` of them.

        `look` is called before each partition; what it raises passes through.
        """
        found = Duplicates()
        for partition in range(NUM_PARTITIONS):
            look()
            blocks = ((block, 0) for block in self._read_blocks(partition))
            found = found.plus(find_repeated(blocks), limit)
        return found

    def _read_blocks(self, partition: int) -> Iterator[bytes]:
        if self._file is not None:
            for number in self._blocks[partition]:
                self._file.seek(number * _BLOCK_BYTES)
                yield self._file.read(_BLOCK_BYTES)
            self._file.seek(self._num_blocks * _BLOCK_BYTES)
        yield bytes(self._tails[partition])


def find_repeated(
    pieces: Iterable[tuple[bytes, int]], slice_number: int = 0, num_slices: int = 1
) -> Iterator[Duplicate]:
    """Yield the lines of one partition, or of a slice of it, that repeat an id.

    `pieces` are its bytes in the order of the file, each with what its line numbers are raised by.
    """
    first_lines: dict[bytes, int] = {}
    for piece, shift in pieces:
        for digest, line in _RECORD.iter_unpack(piece):
            if num_slices > 1 and digest[0] * num_slices >> 8 != slice_number:
                continue
            number = int.from_bytes(line, "little") + shift
            first = first_lines.setdefault(digest, number)
            if first != number:
                yield Duplicate(number, first)
