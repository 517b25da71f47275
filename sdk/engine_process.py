"""Engine process of a Python program, and the thread that communicates with it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import count
from typing import Any, Final, TypeVar

from pydantic_core import PydanticSerializationError, from_json, to_json

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import print_not_run
from tidemill.engine_process import client as engine_client
from tidemill.engine_process.frames import FrameError, Row
from tidemill.engine_process.loop_thread import LoopThread
from tidemill.protocol.contract import EngineInfo, EngineStats, Usage
from tidemill.protocol.stall import STALL_SECONDS, START_SECONDS

from .errors import EngineDied, RequestFailed
from .in_flight import Sent

_MAX_BYTES: Final = 4_000
_MAX_LINES: Final = 20
_READ_BYTES: Final = 2**16
# How long to wait for an ended process, whose child may still hold the pipe.
_END_SECONDS: Final = 1.0
_STDERR: Final = 2


class StderrTail:
    """Pipe for the standard error of a process, and the thread that reads it.

    Only that process may have `writer_fd`.
    """

    def __init__(self) -> None:
        reader, self.writer_fd = os.pipe()
        self._tail = b""
        self._ended: Future[None] = Future()
        threading.Thread(
            target=self._pass_on, args=(reader,), name="tidemill-stderr", daemon=True
        ).start()

    async def last_words(self) -> str:
        """Return the last lines of stderr, once the process has ended or after a second."""
        await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=_END_SECONDS)
        text = self._tail.decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-_MAX_LINES:])

    def _pass_on(self, reader: int) -> None:
        while data := os.read(reader, _READ_BYTES):
            self._tail = (self._tail + data)[-_MAX_BYTES:]
            with suppress(OSError):  # ours is closed or full
                os.write(_STDERR, data)
        os.close(reader)
        self._ended.set_result(None)


_CLOSE_SECONDS = 20.0
_INFLIGHT_PER_SEQUENCE = 4
_POLL_SECONDS = 0.05
_CLOSED = "the engine is closed"
_TOO_LONG = "the request is too long"
_OF_ANOTHER_PROCESS = (
    "the engine was started in another process, and a fork cannot use it: start processes with "
    '`multiprocessing.get_context("spawn")`, and create an Engine in each of them'
)

_Result = TypeVar("_Result")


class EngineProcess:
    """The engine's process, and the thread with the event loop that communicates with it."""

    def __init__(self, command: list[str], *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stderr = StderrTail()
        self._client = engine_client.EngineClient(
            command,
            stall_seconds=stall_seconds,
            start_seconds=START_SECONDS,
            stderr=self._stderr.writer_fd,
        )
        self._numbers = count(1)
        self._pid = os.getpid()
        self._thread = LoopThread("tidemill-engine")
        self._is_closed = False
        self._started = self._in_loop(self._start())

    def send(self, url: str, body: Mapping[str, Any]) -> Sent[dict[str, Any]]:
        """Send a request; its future gets the response's body, RequestFailed or EngineDied."""
        line = {"custom_id": "", "url": url, "body": body}
        try:
            data = to_json(line)
        except PydanticSerializationError as exc:
            raise TypeError(f"the request cannot be serialized to JSON: {exc}") from exc
        return Sent(self._in_loop(self._answer(data)), len(data))

    def send_line(self, number: int, data: bytes) -> Sent[Row]:
        """Send a line of a file; its future gets the row, possibly an error row, or EngineDied."""
        return Sent(self._in_loop(self._answer_line(number, data)), len(data))

    def info(self) -> EngineInfo:
        """Wait for the model and return its information; raises EngineDied."""
        self._check_process()
        return self._started.result()

    def pid(self) -> int:
        """Return the ID of the process, once the model is loaded."""
        self.info()
        return self._client.pid

    def max_inflight(self) -> int:
        """Return the number of requests that keeps the engine busy, once it is loaded."""
        return max_inflight(self.info())

    def stats(self) -> EngineStats:
        """Return the last statistics."""
        return self._client.stats

    def close(self) -> None:
        """End the process and the thread; idempotent."""
        if self._is_closed or os.getpid() != self._pid:  # a fork's copy has no process
            return
        if self._thread.is_current:  # garbage collection ran in it
            threading.Thread(target=self.close, daemon=True).start()
            return
        self._is_closed = True
        with suppress(TimeoutError, CancelledError):
            self._thread.submit(self._end()).result(timeout=_CLOSE_SECONDS)
        self._thread.end()

    def _check_process(self) -> None:
        """Raise EngineDied in a fork, which has neither the thread nor the pipes."""
        if os.getpid() != self._pid:
            raise EngineDied(_OF_ANOTHER_PROCESS)

    def _in_loop(self, running: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        if os.getpid() != self._pid:
            running.close()
            self._check_process()
        if self._is_closed or not self._thread.is_alive:
            running.close()
            raise EngineDied(_CLOSED)
        return self._thread.submit(running)

    async def _start(self) -> EngineInfo:
        try:
            return await self._client.start()
        except engine_client.EngineFailed as exc:
            raise await self._died(f"the engine did not start: {exc}") from exc

    async def _answer(self, data: bytes) -> dict[str, Any]:
        try:
            row = await self._fetch_row(next(self._numbers), data)
        except FrameError as exc:
            raise RequestFailed(
                f"{_TOO_LONG}: {exc}", status_code=413, code="too_long", param=None
            ) from exc
        fields: dict[str, Any] = from_json(row.row)
        if not row.is_success:
            raise RequestFailed.from_row(fields)
        body: dict[str, Any] = fields["response"]["body"]
        return body

    async def _answer_line(self, number: int, data: bytes) -> Row:
        try:
            return await self._fetch_row(number, data)
        except FrameError as exc:
            return too_long_row(number, data, exc)

    async def _fetch_row(self, number: int, data: bytes) -> Row:
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
            return await self._client.fetch_row(number, int(time.time()), data)
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineDied(_CLOSED) from None
            raise
        except engine_client.EngineDied as exc:
            raise await self._died(f"the engine's process has ended: {exc}") from exc

    async def _died(self, reason: str) -> EngineDied:
        words = "" if self._is_closed else await self._stderr.last_words()
        return EngineDied(f"{reason}\nThe last lines of its stderr:\n{words}" if words else reason)

    async def _end(self) -> None:
        await self._client.close()
        while not self._started.done():  # its process is being started
            await asyncio.sleep(_POLL_SECONDS)
            await self._client.close()


def max_inflight(info: EngineInfo) -> int:
    """Return the number of requests that keeps an engine busy."""
    return _INFLIGHT_PER_SEQUENCE * info.max_num_seqs


def too_long_row(number: int, data: bytes, exc: FrameError) -> Row:
    """Return the error row of a line that is too long to send."""
    digest, message = RawLine(number, data).digest, f"{_TOO_LONG}: {exc}"
    row = print_not_run(digest, None, code="too_long", message=message)
    return Row(0, is_success=False, usage=Usage(), row=row)
