"""A pinned object as a seekable file, read range by range."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill.batch.model import Source

from ..bucket import read_range
from ..sync import Aws

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 2**22


def open_object(
    aws: Aws, source: Source, check: Callable[[], None] = lambda: None
) -> io.BufferedReader:
    """Return an object as an open file, with a check before each request.

    Reads raise ObjectChanged or NotThere if the pinned object was replaced or deleted.
    """
    return io.BufferedReader(_ObjectFile(aws, source, check), _BUFFER_BYTES)


class _ObjectFile(io.RawIOBase):
    def __init__(self, aws: Aws, source: Source, check: Callable[[], None]) -> None:
        super().__init__()
        self._aws = aws
        self._source = source
        self._check = check
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.num_bytes}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        self._check()
        end = min(self._position + len(view), self._source.num_bytes)
        data = self._aws.run(read_range(self._source, self._position, end))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
