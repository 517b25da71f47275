"""Frames: the wire to an engine process, over two pipes; to the host of a shared one, a socket.

A frame is the length of its payload (4 bytes), its kind (1 byte) and the payload; numbers are
big-endian. Frequent payloads are packed, rare ones are JSON. Both ends have the same version, so
there is no negotiation, and an unreadable frame is an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple, Self

from tidemill.protocol.contract import EngineInfo, EngineStats, Usage
from tidemill.protocol.errors import ProtocolError

# More than any line or row: a longer frame is invalid.
MAX_PAYLOAD_BYTES = 256 * 2**20

MAX_ROW_BYTES = MAX_PAYLOAD_BYTES - 2**10

_READ_AHEAD_BYTES = 2**20
_HEADER = struct.Struct("!IB")
_RUN = struct.Struct("!QQq")
_ASK = struct.Struct("!Qq?")
_ANSWER = struct.Struct("!QB")
_ABORT = struct.Struct("!Q")
_ROW = struct.Struct("!Q?QQQdQ")


class FrameError(ProtocolError):
    """Bytes that are not a valid frame, or a frame that is too long to send."""

    code = "broken_frame"


class Run(NamedTuple):
    """To the engine: run request line `number`, whose bytes are `data`; see `run_line`.

    `ticket` identifies the request for the lifetime of the process; `created` is in seconds since
    the epoch.
    """

    ticket: int
    number: int
    created: int
    data: bytes

    def pack(self) -> bytes:
        """Return the payload."""
        return _RUN.pack(self.ticket, self.number, self.created) + self.data

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        ticket, number, created = _RUN.unpack_from(payload)
        return cls(ticket, number, created, payload[_RUN.size :])


@dataclass(frozen=True, slots=True)
class Ask:
    """To the engine: answer a request, `data` of `exchange.encode_request`, in one or more frames.

    A request that `is_online` has priority over rows of files, and may be streamed.
    """

    ticket: int
    created: int
    is_online: bool
    data: bytes

    def pack(self) -> bytes:
        """Return the payload."""
        return _ASK.pack(self.ticket, self.created, self.is_online) + self.data

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        ticket, created, is_online = _ASK.unpack_from(payload)
        return cls(ticket, created, is_online, payload[_ASK.size :])


class AnswerKind(IntEnum):
    """Kind of an answer's frame: a reply, a chunk of a stream, its end, or a fault."""

    REPLY = 1
    CHUNK = 2
    END = 3
    FAULT = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """From the engine: a frame of the answer to an `Ask`; every kind except a chunk is the last."""

    ticket: int
    kind: AnswerKind
    data: bytes = b""

    def pack(self) -> bytes:
        """Return the payload."""
        return _ANSWER.pack(self.ticket, self.kind) + self.data

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        ticket, kind = _ANSWER.unpack_from(payload)
        return cls(ticket, AnswerKind(kind), payload[_ANSWER.size :])


@dataclass(frozen=True, slots=True)
class Abort:
    """To the engine: abort a request; its row may already be in the pipe."""

    ticket: int

    def pack(self) -> bytes:
        """Return the payload."""
        return _ABORT.pack(self.ticket)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        return cls(*_ABORT.unpack(payload))


@dataclass(frozen=True, slots=True)
class Fetched:
    """To the engine, once, if its command contains weights by URL: the folder of each."""

    folders: Mapping[str, str]

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(dict(self.folders)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        return cls(dict(json.loads(payload)))


class Row(NamedTuple):
    """From the engine: the serialized row of a request, and its usage."""

    ticket: int
    is_success: bool
    usage: Usage
    row: bytes

    def pack(self) -> bytes:
        """Return the payload."""
        return _ROW.pack(self.ticket, self.is_success, *self.usage) + self.row

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        ticket, is_success, *usage = _ROW.unpack_from(payload)
        return cls(ticket, is_success, Usage._make(usage), payload[_ROW.size :])


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engine, first and once: the model is loaded and requests are answered."""

    info: EngineInfo

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self.info)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        info = json.loads(payload)
        several = {name: tuple(info[name]) for name in ("notes", "adapters", "endpoints")}
        return cls(EngineInfo(**info | several))


@dataclass(frozen=True, slots=True)
class Stats:
    """From the engine, every second: statistics; `steps` and `layers` do not grow during a hang."""

    stats: EngineStats

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self.stats)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        return cls(EngineStats(**json.loads(payload)))


@dataclass(frozen=True, slots=True)
class Failed:
    """From the engine, last: it cannot be loaded or has failed, and its process ends."""

    message: str
    code: str

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Return the frame of a payload."""
        return cls(**json.loads(payload))


Frame = Run | Abort | Row | Ready | Stats | Failed | Fetched | Ask | Answer

_TYPE_OF: dict[int, type[Frame]] = dict(
    enumerate((Run, Abort, Row, Ready, Stats, Failed, Fetched, Ask, Answer), start=1)
)
_KIND_OF = {frame_type: kind for kind, frame_type in _TYPE_OF.items()}


def encode_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame; raise FrameError if it is too long for the wire."""
    payload = frame.pack()
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _too_long(len(payload))
    return _HEADER.pack(len(payload), _KIND_OF[type(frame)]) + payload


def decode_frame(kind: int, payload: bytes) -> Frame:
    """Decode a frame of this kind; raise FrameError for an invalid payload."""
    frame_type = _TYPE_OF.get(kind)
    if frame_type is None:
        raise FrameError(f"unknown frame kind {kind}")
    try:
        return frame_type.unpack(payload)
    except (struct.error, ValueError, TypeError, KeyError) as exc:
        raise FrameError(f"invalid {frame_type.__name__} frame: {exc}") from exc


async def open_wire(reader_fd: int, writer_fd: int) -> tuple[asyncio.StreamReader, FrameWriter]:
    """Return streams over one end of each pipe; the streams own the descriptors."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READ_AHEAD_BYTES)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reader_fd, "rb", buffering=0)
    )
    transport, protocol = await loop.connect_write_pipe(
        # Only for its flow control: nothing is read from this end.
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()),
        os.fdopen(writer_fd, "wb", buffering=0),
    )
    return reader, FrameWriter(asyncio.StreamWriter(transport, protocol, None, loop))


class FrameReader:
    """Reads frames from a stream: all that have arrived at a time."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._unread = b""

    async def read(self) -> list[Frame]:
        """Return the next frames; none if the pipe was closed after the last one.

        Raises FrameError for a frame that is truncated, too long or unknown; reading must then
        stop.
        """
        while not (frames := self._take()):
            if len(self._unread) < _HEADER.size:
                more = await self._stream.read(_READ_AHEAD_BYTES)
                if not more and self._unread:
                    raise _truncated(len(self._unread), _HEADER.size)
            else:  # a long frame is not copied for each piece of it
                whole = _HEADER.unpack_from(self._unread)[0]
                num_read = len(self._unread) - _HEADER.size
                try:
                    more = await self._stream.readexactly(whole - num_read)
                except asyncio.IncompleteReadError as exc:
                    raise _truncated(num_read + len(exc.partial), whole) from exc
            if not more:
                break
            self._unread += more
        return frames

    def _take(self) -> list[Frame]:
        """Remove the complete frames from the unread bytes, up to an invalid one.

        Raises FrameError if the first one is invalid.
        """
        data, start = self._unread, 0
        frames = list[Frame]()
        while len(data) >= start + _HEADER.size:
            num_bytes, kind = _HEADER.unpack_from(data, start)
            first = start + _HEADER.size
            try:
                if num_bytes > MAX_PAYLOAD_BYTES:
                    raise _too_long(num_bytes)
                if len(data) < first + num_bytes:
                    break
                frames.append(decode_frame(kind, data[first : first + num_bytes]))
            except FrameError:
                if frames:
                    break
                raise
            start = first + num_bytes
        self._unread = data[start:]
        return frames


class FrameWriter:
    """Writes frames to a stream: those of one turn of the event loop at a time."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._unwritten: list[bytes] = []

    def write(self, frame: Frame) -> None:
        """Write a frame; raises FrameError if it is too long for the wire."""
        data = encode_frame(frame)
        if not self._unwritten:
            self._loop.call_soon(self.flush)
        self._unwritten.append(data)

    def flush(self) -> None:
        """Write all frames now."""
        data, self._unwritten = b"".join(self._unwritten), []
        if data and not self._stream.is_closing():
            self._stream.write(data)

    async def drain(self) -> None:
        """Wait until the stream takes more bytes; raises ConnectionError."""
        await self._stream.drain()

    def is_closing(self) -> bool:
        """Return whether frames are dropped, because the stream is closed or broken."""
        return self._stream.is_closing()

    def close(self) -> None:
        """Write the last frames, and close the stream. Idempotent."""
        self.flush()
        self._stream.close()

    async def wait_closed(self) -> None:
        """Wait until all frames are written; raises OSError."""
        await self._stream.wait_closed()

    def abort_unread(self) -> None:
        """Drop the bytes that the other end has not read, if any."""
        if self._stream.transport.get_write_buffer_size():
            self._stream.transport.abort()


def receive_frame(read: Callable[[int], bytes]) -> Frame | None:
    """Return the next frame, None at the end; `read` waits for a number of bytes or the end.

    Raises FrameError as `FrameReader.read`.
    """
    header = read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise _truncated(len(header), _HEADER.size)
    num_bytes, kind = _HEADER.unpack(header)
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise _too_long(num_bytes)
    payload = read(num_bytes)
    if len(payload) < num_bytes:
        raise _truncated(len(payload), num_bytes)
    return decode_frame(kind, payload)


def _truncated(num_bytes: int, whole: int) -> FrameError:
    return FrameError(f"truncated frame: the pipe ended after {num_bytes:,} of {whole:,} bytes")


def _too_long(num_bytes: int) -> FrameError:
    return FrameError(
        f"a frame of {num_bytes:,} bytes is too long: the limit is {MAX_PAYLOAD_BYTES:,}"
    )
