"""Lines of a plain file by number: the newlines before each block of it, 8 bytes per MiB.

A block is read once to count its newlines; a line is then searched for in its block.
"""

from __future__ import annotations

import io
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Final

from .lines import MAX_LINE_BYTES, RawLine, read_lines

BLOCK_BYTES: Final = 2**20


class LineBlocks:
    """Newlines before each block of a file, for several threads; `data` is from `to_bytes`."""

    def __init__(self, data: bytes = b"") -> None:
        self._newlines = array("Q", data or bytes(8))
        self._lock = Lock()
        self._num_bytes = self._num_open = 0  # of bytes that were added

    def to_bytes(self) -> bytes:
        """Return the counts, for the machine that made them."""
        return self._newlines.tobytes()

    def count_all(self, descriptor: int) -> int:
        """Count the newlines of the whole file, unless they are known, and return their number."""
        while self._count_block(descriptor):
            pass
        return self._newlines[-1]

    def add(self, start: int, data: bytes) -> None:
        """Count the newlines of bytes from `start` on that follow those counted before.

        A block counts once all of it was read; other bytes are ignored.
        """
        new = data[self._num_bytes - start :] if start <= self._num_bytes else b""
        while new:
            room = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            self._num_open += new.count(b"\n", 0, room)
            self._num_bytes += len(new[:room])
            if len(new) >= room:
                self._newlines.append(self._newlines[-1] + self._num_open)
                self._num_open = 0
            new = new[room:]

    def lines(
        self, descriptor: int, first_number: int, *, max_line_bytes: int = MAX_LINE_BYTES
    ) -> Iterator[RawLine]:
        """Yield the non-blank lines from a 1-based number on, which includes blank lines."""
        start = self._start_of(descriptor, first_number)
        if start is not None:
            stream = io.BufferedReader(PositionedStream(descriptor, start), BLOCK_BYTES)
            yield from read_lines(stream, max_line_bytes=max_line_bytes, first_number=first_number)

    def _start_of(self, descriptor: int, number: int) -> int | None:
        """Return the offset of a line; None beyond the end."""
        newline = number - 1
        if not newline:
            return 0
        while self._newlines[-1] < newline:
            if not self._count_block(descriptor):
                return None
        block = bisect_left(self._newlines, newline) - 1
        data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
        end = -1
        for _ in range(newline - self._newlines[block]):
            end = data.find(b"\n", end + 1)
        return block * BLOCK_BYTES + end + 1

    def _count_block(self, descriptor: int) -> bool:
        """Count the newlines of the next block; return False at the end of the file."""
        with self._lock:
            data = os.pread(descriptor, BLOCK_BYTES, (len(self._newlines) - 1) * BLOCK_BYTES)
            if data:
                self._newlines.append(self._newlines[-1] + data.count(b"\n"))
            return bool(data)


class CountedFile(io.FileIO):
    """A file whose newlines are counted in `blocks` while it is read from its start."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blocks = LineBlocks()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read the next bytes."""
        start = self.tell()
        size = super().readinto(buffer) or 0
        self.blocks.add(start, bytes(buffer[:size]))
        return size


class PositionedStream(io.RawIOBase):
    """A stream with a separate position in a shared file."""

    def __init__(self, descriptor: int, start: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._offset = start

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: any position can be read."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position."""
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset}
        base = bases[whence] if whence in bases else os.fstat(self._descriptor).st_size
        self._offset = offset + base
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read a block at the position."""
        data = os.pread(self._descriptor, len(buffer), self._offset)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
