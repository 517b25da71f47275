"""Line file: lines of an open plain file from any number on, readable by several threads.

Only offsets of blocks are stored, 8 bytes per MiB; lines are searched for in their block.
"""

from __future__ import annotations

import io
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from threading import Lock
from typing import IO

from tidemill.batch.file.lines import RawLine, read_lines

from .source import Source

_BLOCK_BYTES = 2**20
_MAX_LINE_BYTES = 2**26


class LineFile:
    """Lines of a plain file; raises InputChanged if it was modified since it was opened."""

    def __init__(self, file: IO[bytes], source: Source) -> None:
        self._fd = file.fileno()
        self._source = source
        self._lock = Lock()
        self._newlines = array("Q", [0])  # before each block
        self.name = source.name

    def lines(self, first_number: int) -> Iterator[RawLine]:
        """Yield the non-blank lines from a 1-based number on, which includes blank lines."""
        self._source.check()
        start = self._start_of(first_number)
        if start is not None:
            stream = io.BufferedReader(PositionedStream(self._fd, start), _BLOCK_BYTES)
            yield from read_lines(stream, max_line_bytes=_MAX_LINE_BYTES, first_number=first_number)

    def line(self, number: int) -> RawLine | None:
        """Return one line; None if it does not exist or is blank."""
        found = next(self.lines(number), None)
        return found if found is not None and found.number == number else None

    def count(self) -> int:
        """Return the number of lines, including blank ones."""
        while self._count_block():
            pass
        size = os.fstat(self._fd).st_size
        is_ended = not size or os.pread(self._fd, 1, size - 1) == b"\n"
        return self._newlines[-1] + (not is_ended)

    def _start_of(self, number: int) -> int | None:
        """Return the offset of a line; None beyond the end."""
        newline = number - 1
        if not newline:
            return 0
        while self._newlines[-1] < newline:
            if not self._count_block():
                return None
        block = bisect_left(self._newlines, newline) - 1
        data = os.pread(self._fd, _BLOCK_BYTES, block * _BLOCK_BYTES)
        end = -1
        for _ in range(newline - self._newlines[block]):
            end = data.find(b"\n", end + 1)
        return block * _BLOCK_BYTES + end + 1

    def _count_block(self) -> bool:
        """Count the newlines of the next block; return False at the end of the file."""
        with self._lock:
            data = os.pread(self._fd, _BLOCK_BYTES, (len(self._newlines) - 1) * _BLOCK_BYTES)
            if data:
                self._newlines.append(self._newlines[-1] + data.count(b"\n"))
            return bool(data)


class PositionedStream(io.RawIOBase):
    """A stream with a separate position in a shared file."""

    def __init__(self, fd: int, start: int) -> None:
        super().__init__()
        self._fd = fd
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
        self._offset = offset + (bases[whence] if whence in bases else os.fstat(self._fd).st_size)
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read a block at the position."""
        data = os.pread(self._fd, len(buffer), self._offset)
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)
