"""A file, as a form or as a whole body, received to disk piece by piece; memory stays flat."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final
from uuid import uuid4

from starlette.requests import Request

from server.clients import ClientGone
from server.errors import Refused, too_large
from server.forms import FormReader
from server.local.folder import Folder, is_full

_WRITTEN_BYTES: Final = 2**20
_SLACK_BYTES: Final = 2**20  # of what stands around a file in a form
# A body may say nothing for so long, and over all its time must come as fast as this on average.
_IDLE_SECONDS: Final = 60.0
_LEAST_BYTES_A_SECOND: Final = 16 * 2**10


@dataclass(frozen=True, slots=True)
class Received:
    """What a form held: its fields, and a file at `path`, which goes unless it is moved away."""

    path: Path
    fields: dict[str, str]
    filename: str | None
    num_bytes: int
    has_file: bool


@dataclass(slots=True)
class _Writing:
    """A file that grows: held bytes are written when they are many, in a thread."""

    file: IO[bytes]
    max_bytes: int
    num_bytes: int = 0
    held: bytearray = field(default_factory=bytearray)

    async def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            raise too_large(self.max_bytes)
        self.held += data
        if len(self.held) >= _WRITTEN_BYTES:
            await self._write()

    async def end(self) -> None:
        await self._write()
        await asyncio.to_thread(self._sync)

    def _sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    async def _write(self) -> None:
        held, self.held = self.held, bytearray()
        await asyncio.to_thread(self.file.write, held)


@asynccontextmanager
async def received(
    request: Request, folder: Folder, file_field: str, max_bytes: int
) -> AsyncIterator[Received]:
    """Receive a form, and yield what it held.

    Raises `RequestError` for what is no whole form, `Refused` for a file above `max_bytes`, one
    that the disk has no room for, or a body that stops coming.
    """
    _check_length(request, folder, max_bytes)
    reader = FormReader(request.headers.get("content-type", ""), file_field)
    with incoming(folder) as path:
        with path.open("wb") as file:
            writing = _Writing(file, max_bytes)
            async for chunk in _chunks(request):
                await writing.add(reader.read(chunk))
            reader.end()
            await writing.end()
        yield Received(path, reader.fields, reader.filename, writing.num_bytes, reader.has_file)


@asynccontextmanager
async def received_body(
    request: Request, folder: Folder, max_bytes: int
) -> AsyncIterator[tuple[Path, int]]:
    """Receive a body as it is, and yield where it lies and its size; raises as `received`."""
    _check_length(request, folder, max_bytes)
    with incoming(folder) as path:
        with path.open("wb") as file:
            writing = _Writing(file, max_bytes)
            async for chunk in _chunks(request):
                await writing.add(chunk)
            await writing.end()
        yield path, writing.num_bytes


@contextmanager
def incoming(folder: Folder) -> Iterator[Path]:
    """Yield where something may be received, which goes unless it is moved away."""
    path = folder.incoming / uuid4().hex
    try:
        yield path
    except (OSError, sqlite3.Error) as exc:
        if is_full(exc):
            raise no_room() from exc
        raise
    finally:
        path.unlink(missing_ok=True)


def no_room() -> Refused:
    """Return the refusal of what the disk has no room for."""
    return Refused(
        "The disk of the server is full: delete files that nobody needs, or make room.",
        status_code=507,
        code="disk_full",
        type="server_error",
        headers={"Connection": "close", "x-should-retry": "false"},
    )


def _check_length(request: Request, folder: Folder, max_bytes: int) -> None:
    """Refuse at once what cannot be taken to its end."""
    length = int(request.headers.get("content-length") or 0)
    if length > max_bytes + _SLACK_BYTES:
        raise too_large(max_bytes)
    if length > shutil.disk_usage(folder.root).free:
        raise no_room()


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    ends = clock() + _IDLE_SECONDS
    is_open = True
    while is_open:
        try:
            async with asyncio.timeout_at(min(ends, clock() + _IDLE_SECONDS)):
                message = await request.receive()
        except TimeoutError:
            raise Refused(
                f"The body stopped for {_IDLE_SECONDS:g} s, or came more slowly than"
                f" {_LEAST_BYTES_A_SECOND:,} bytes a second.",
                status_code=408,
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        is_open = message.get("more_body", False)
        body = message.get("body", b"")
        ends += len(body) / _LEAST_BYTES_A_SECOND
        yield body
