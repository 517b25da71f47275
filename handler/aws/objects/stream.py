"""The input object as a stream that reconnects, and the lines of that stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, Protocol

from botocore.exceptions import BotoCoreError
from urllib3.exceptions import HTTPError

from tidemill.batch.model import Source
from tidemill.net.backoff import exponential_delay

from ...errors import AwsError, NotThere, ObjectChanged
from ...observability import logger
from ..bucket import pinned

CHUNK_BYTES = 2**20
_NUM_TRIES = 6
_FIRST_DELAY_SECONDS = 0.2
_BROKEN = (BotoCoreError, HTTPError, OSError)


class Opener(Protocol):
    """Opens objects, as `handler.aws.sync.Aws` does."""

    def open(self, **pin: Any) -> IO[bytes]:
        """Return the body of an object as a stream; `pin` are arguments of `get_object`."""


class ObjectStream:
    """The bytes of a pinned object in order, from `start` on.

    A broken connection is opened again at the same position, a few times in a row at most.
    """

    def __init__(
        self,
        aws: Opener,
        source: Source,
        start: int = 0,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._aws = aws
        self._source = source
        self._position = start
        self._sleep = sleep
        self._body: IO[bytes] | None = None

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none only at the end.

        Raises ObjectChanged or NotThere if the pinned object was replaced or deleted, AwsError if
        it cannot be read.
        """
        left = self._source.num_bytes - self._position
        if left <= 0:
            return b""
        reason = ""
        for failure in range(_NUM_TRIES):
            if failure:
                logger.warning("connection broken", key=self._source.key, reason=reason)
                self.close()
                self._sleep(exponential_delay(failure - 1, _FIRST_DELAY_SECONDS))
            try:
                if self._body is None:
                    self._body = self._open()
                data = self._body.read(min(size, left))
            except _BROKEN as exc:
                reason = repr(exc)
            else:
                if data:
                    self._position += len(data)
                    return data
                reason = "it ended early"
        raise AwsError(f"{self._source.key} cannot be read at byte {self._position:,}: {reason}")

    def close(self) -> None:
        """Close the connection."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def _open(self) -> IO[bytes]:
        wanted = {"Range": f"bytes={self._position}-"} if self._position else {}
        try:
            # Without the version while it is the newest: MiniStack lacks ranges of versions.
            return self._aws.open(**pinned(replace(self._source, version_id=None)), **wanted)
        except (ObjectChanged, NotThere):
            if self._source.version_id is None:
                raise
            return self._aws.open(**pinned(self._source), **wanted)


class ByteSource(Protocol):
    """A stream of bytes; an open file is one."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none only at the end."""


class LineStream:
    r"""Reads a stream line by line, with the position of each line.

    It begins at byte `start` and ends before the first line that begins at byte `stop` or later,
    or after `max_lines` whole lines. `look` is called before each chunk is read; its exceptions
    propagate.
    """

    def __init__(
        self,
        stream: ByteSource,
        *,
        start: int = 0,
        stop: float = math.inf,
        max_lines: float = math.inf,
        look: Callable[[], None] = lambda: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.num_lines = 0  # whole ones
        self.end = start  # of the last whole line
        self.line_start = start  # of the line that was read last, whole or not
        self._stream = stream
        self._stop = stop
        self._max_lines = max_lines
        self._look = look
        self._chunk_bytes = chunk_bytes
        self._chunk = b""
        self._chunk_start = start
        self._position = 0
        self._is_at_end = False

    def tell(self) -> int:
        """Return the position after the last line read."""
        return self._chunk_start + self._position

    def readline(self, size: int, /) -> bytes:
        r"""Return the bytes up to and with the next `\n`, at most `size`; none at the end."""
        position = self._position
        if (
            self.end >= self._stop or self.num_lines >= self._max_lines
        ) and self.tell() == self.end:
            return b""
        after = self._chunk.find(b"\n", position, position + size) + 1
        if after:
            data = self._chunk[position:after]
            self._position = after
        else:
            data = self._assemble(size)
        self.line_start = self.end
        if data.endswith(b"\n"):
            self.end = self._chunk_start + self._position
            self.num_lines += 1
        return data

    def _assemble(self, size: int) -> bytes:
        """Read a line that spans several chunks."""
        pieces: list[bytes] = []
        while True:
            stop = min(self._position + size, len(self._chunk))
            after = self._chunk.find(b"\n", self._position, stop) + 1 or stop
            pieces.append(self._chunk[self._position : after])
            size -= after - self._position
            self._position = after
            if size == 0 or pieces[-1].endswith(b"\n") or not self._next_chunk():
                return b"".join(pieces)

    def _next_chunk(self) -> bool:
        if self._is_at_end:
            return False
        self._look()
        chunk = self._stream.read(self._chunk_bytes)
        self._is_at_end = not chunk
        self._chunk_start += len(self._chunk)
        self._chunk, self._position = chunk, 0
        return bool(chunk)
