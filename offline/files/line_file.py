"""Line file: lines of an open plain file from any number on, readable by several threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO

from tidemill.batch.file.line_blocks import LineBlocks
from tidemill.batch.file.lines import RawLine

from .source import Source

_MAX_LINE_BYTES = 2**26


class LineFile:
    """Lines of a plain file; raises InputChanged if it was modified since it was opened."""

    def __init__(self, file: IO[bytes], source: Source) -> None:
        self._fd = file.fileno()
        self._source = source
        self._blocks = LineBlocks()
        self.name = source.name

    def lines(self, first_number: int) -> Iterator[RawLine]:
        """Yield the non-blank lines from a 1-based number on, which includes blank lines."""
        self._source.check()
        return self._blocks.lines(self._fd, first_number, max_line_bytes=_MAX_LINE_BYTES)

    def line(self, number: int) -> RawLine | None:
        """Return one line; None if it does not exist or is blank."""
        found = next(self.lines(number), None)
        return found if found is not None and found.number == number else None

    def count(self) -> int:
        """Return the number of lines, including blank ones."""
        num_newlines = self._blocks.count_all(self._fd)
        size = os.fstat(self._fd).st_size
        is_ended = not size or os.pread(self._fd, 1, size - 1) == b"\n"
        return num_newlines + (not is_ended)
