"""Finds repeated custom IDs in files of any length with constant memory.

Each ID costs 16 bytes of a temporary file: 10 for its hash and 6 for its line number. Another hash
byte chooses the partition, so two IDs count as equal only if 88 bits agree.
The IDs that several finders saved for ranges of a file are searched share by share: an ID is
always in the same share.
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
_ANY_TEXT = ("utf-8", "surrogatepass")
_RECORD = Struct(f"{_HASH_BYTES}s{_NUMBER_BYTES}s")
# Maximum number of IDs in one share; in memory an ID takes 140 bytes.
_MAX_SHARE_IDS = 2**22


class Duplicate(NamedTuple):
    """`line` repeats the custom ID of `first_line`."""

    line: int
    first_line: int


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Number of lines that repeat an ID, and the first ones in file order."""

    count: int = 0
    first: tuple[Duplicate, ...] = ()

    def plus(self, duplicates: Iterable[Duplicate], limit: int) -> Duplicates:
        """Return these and others; only the first `limit` are listed."""
        count = self.count

        def counted() -> Iterator[Duplicate]:
            nonlocal count
            for duplicate in duplicates:
                count += 1
                yield duplicate

        first = tuple(heapq.nsmallest(limit, chain(self.first, counted())))
        return Duplicates(count, first)

    def merged(self, others: Duplicates, limit: int) -> Duplicates:
        """Return these and the ones of another share."""
        first = tuple(sorted((*self.first, *others.first))[:limit])
        return Duplicates(self.count + others.count, first)


@dataclass(frozen=True, slots=True)
class Share:
    """IDs that are searched together: partitions `first` to `end`, or one slice of a partition."""

    first: int
    end: int
    slice_number: int = 0
    num_slices: int = 1

    @classmethod
    def nth(cls, number: int, num_shares: int) -> Share:
        """Return share `number` of `num_shares`, a power of two."""
        if num_shares <= NUM_PARTITIONS:
            step = NUM_PARTITIONS // num_shares
            return cls(number * step, (number + 1) * step)
        partition, slice_number = divmod(number, num_shares // NUM_PARTITIONS)
        return cls(partition, partition + 1, slice_number, num_shares // NUM_PARTITIONS)


def count_shares(num_ids: int) -> int:
    """Return the number of shares for this number of IDs, so that one share fits in memory."""
    num_full = max(0, num_ids - 1) // _MAX_SHARE_IDS
    return 1 << num_full.bit_length()


class DuplicateFinder:
    """Collects the custom ID of each line, then finds the repeated ones.

    A context manager: it creates a temporary file in `folder` once the IDs exceed a megabyte of
    memory, and deletes the file on exit.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._num_blocks = 0
        # For each partition: the block being filled, and the numbers of its blocks in the file.
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
        """Add the custom ID of a line; lines come in file order."""
        name = custom_id.encode() if custom_id.isascii() else custom_id.encode(*_ANY_TEXT)
        self.add_encoded(name, line)

    def add_encoded(self, name: bytes, line: int) -> None:
        """Add the custom ID of a line, in UTF-8."""
        digest = blake2b(name, digest_size=_HASH_BYTES + 1).digest()
        tail = self._tails[digest[0]]
        tail += digest[1:] + line.to_bytes(_NUMBER_BYTES, "little")
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
        """Write all IDs by partition, and return the number of IDs in each."""
        for partition in range(NUM_PARTITIONS):
            for block in self._read_blocks(partition):
                stream.write(block)
        return [
            (len(blocks) * _BLOCK_BYTES + len(tail)) // RECORD_BYTES
            for blocks, tail in zip(self._blocks, self._tails, strict=True)
        ]

    def find(self, limit: int = 100, look: Callable[[], None] = lambda: None) -> Duplicates:
        """Return the number of lines that repeat an ID, and the first `limit` of them.

        `look` is called before each partition; its exceptions pass through.
        """
        duplicates = Duplicates()
        for partition in range(NUM_PARTITIONS):
            look()
            blocks = ((block, 0) for block in self._read_blocks(partition))
            duplicates = duplicates.plus(find_repeated(blocks), limit)
        return duplicates

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
    """Yield the lines of one partition, or of a slice of it, that repeat an ID.

    `pieces` are its bytes in file order, each with the number to add to its line numbers.
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
