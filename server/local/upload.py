"""Upload to disk: multipart form or raw body, written chunk by chunk; memory stays flat."""

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

from tidemill.protocol.multipart import FormReader

from ..disconnect import ClientDisconnected
from ..errors import Refused, too_large
from .folder import Folder, is_full

_WRITTEN_BYTES: Final = 2**20
_SLACK_BYTES: Final = 2**20  # for the rest of a form around its file
# A body may pause for this long, and must arrive at this average rate.
_IDLE_SECONDS: Final = 60.0
_LEAST_BYTES_A_SECOND: Final = 16 * 2**10


@dataclass(frozen=True, slots=True)
class ReceivedForm:
    """A received form: its fields and a file at `path`, which is deleted unless moved away."""

    path: Path
    fields: dict[str, str]
    filename: str | None
    num_bytes: int
    has_file: bool


@dataclass(slots=True)
class _FileWriter:
    """Buffers bytes and writes them to a file in a thread."""

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
async def receive_form(
    request: Request, folder: Folder, file_field: str, max_bytes: int
) -> AsyncIterator[ReceivedForm]:
    """Receive a multipart form and yield its contents.

    Raises `RequestError` for a broken form, and `Refused` for a file above `max_bytes`, a full disk
    or a body that stalls.
    """
    _check_length(request, folder, max_bytes)
    reader = FormReader(request.headers.get("content-type", ""), file_field)
    with incoming_file(folder) as path:
        with path.open("wb") as file:
            writer = _FileWriter(file, max_bytes)
            async for chunk in _chunks(request):
                await writer.add(reader.read(chunk))
            reader.end()
            await writer.end()
        yield ReceivedForm(path, reader.fields, reader.filename, writer.num_bytes, reader.has_file)


@asynccontextmanager
async def receive_body(
    request: Request, folder: Folder, max_bytes: int
) -> AsyncIterator[tuple[Path, int]]:
    """Receive a raw body and yield its path and size; raises as `receive_form`."""
    _check_length(request, folder, max_bytes)
    with incoming_file(folder) as path:
        with path.open("wb") as file:
            writer = _FileWriter(file, max_bytes)
            async for chunk in _chunks(request):
                await writer.add(chunk)
            await writer.end()
        yield path, writer.num_bytes


@contextmanager
def incoming_file(folder: Folder) -> Iterator[Path]:
    """Yield a path for incoming bytes; they are deleted unless moved away."""
    path = folder.incoming / uuid4().hex
    try:
        yield path
    except (OSError, sqlite3.Error) as exc:
        if is_full(exc):
            raise disk_full() from exc
        raise
    finally:
        path.unlink(missing_ok=True)


def disk_full() -> Refused:
    """Return the 507 for a full disk."""
    return Refused(
        "The server's disk is full: delete unneeded files or free some space.",
        status_code=507,
        code="disk_full",
        type="server_error",
        headers={"Connection": "close", "x-should-retry": "false"},
    )


def _check_length(request: Request, folder: Folder, max_bytes: int) -> None:
    """Refuse at once a body that cannot fit."""
    length = int(request.headers.get("content-length") or 0)
    if length > max_bytes + _SLACK_BYTES:
        raise too_large(max_bytes)
    if length > shutil.disk_usage(folder.root).free:
        raise disk_full()


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
                f"The upload stalled for {_IDLE_SECONDS:g} s, or was slower than"
                f" {_LEAST_BYTES_A_SECOND:,} bytes per second.",
                status_code=408,
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        is_open = message.get("more_body", False)
        body = message.get("body", b"")
        ends += len(body) / _LEAST_BYTES_A_SECOND
        yield body
