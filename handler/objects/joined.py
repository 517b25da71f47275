"""Objects one behind another as one stream, for a part that is sent."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from handler.batch.kinds import SealedSegment

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER_BYTES = 2**20


def open_joined(
    segments: Sequence[SealedSegment], get: Callable[[str], bytes]
) -> io.BufferedReader:
    """Return the segments' bytes in a row; one object is held at a time, and it can be sought."""
    # Buffered, because S3 takes no short chunk in the middle of a part.
    return io.BufferedReader(_Joined(segments, get), _BUFFER_BYTES)


class _Joined(io.RawIOBase):
    def __init__(self, segments: Sequence[SealedSegment], get: Callable[[str], bytes]) -> None:
        self._segments = segments
        self._get = get
        self._position = 0
        self._held: tuple[str, bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        size = sum(segment.num_bytes for segment in self._segments)
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        start = 0
        for segment in self._segments:
            offset = self._position - start
            if offset < segment.num_bytes:
                data = self._bytes_of(segment)[offset : offset + len(view)]
                view[: len(data)] = data
                self._position += len(data)
                return len(data)
            start += segment.num_bytes
        return 0

    def _bytes_of(self, segment: SealedSegment) -> bytes:
        if self._held is None or self._held[0] != segment.key:
            self._held = None
            data = self._get(segment.key)
            if len(data) != segment.num_bytes:
                raise OSError(f"{segment.key} has {len(data):,} bytes, not {segment.num_bytes:,}")
            self._held = (segment.key, data)
        return self._held[1]
