"""Engine process: answers a worker's requests over two pipes.

The wire is `frames`. This module loads no model library: the caller provides `load`.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias, TypeVar

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import Dialect
from tidemill.batch.file.run_line import run_line
from tidemill.protocol.contract import EngineError, Served, Usage

from .exchange import answer_request
from .frames import (
    MAX_ROW_BYTES,
    Abort,
    Ask,
    Failed,
    Fetched,
    Frame,
    FrameError,
    FrameReader,
    FrameWriter,
    Ready,
    Row,
    Run,
    Stats,
    open_wire,
)
from .liveness import STACKS_SIGNAL, LivenessPage, LivenessWriter

logger = logging.getLogger(__name__)

EXIT_FAILED = 3
STATS_SECONDS = 1.0

_TURN_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_STDERR = 2

_Result = TypeVar("_Result")

Load: TypeAlias = Callable[[Callable[[], Mapping[str, str]]], Served]
"""Creates an engine. Its argument waits for the weights and returns the folder of each URL."""


def serve(
    load: Load,
    *,
    reader_fd: int,
    writer_fd: int,
    liveness_fd: int | None = None,
    stats_seconds: float = STATS_SECONDS,
    dialect: Dialect = "openai",
) -> NoReturn:
    """Read requests from one pipe, write rows to the other, then exit this process.

    Exits with 0 once the reader has ended, and with 3 after a `Failed` frame, if `load` raised or
    the engine has failed. Statistics are sent every `stats_seconds`, and heartbeats written to the
    page at `liveness_fd`; error rows use the `dialect`. SIGINT and SIGTERM are ignored: the parent
    process decides. On Linux this process dies with the thread that started it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd in (reader_fd, writer_fd):
        os.set_inheritable(fd, False)  # noqa: FBT003 - its only, positional parameter
    liveness = None
    if liveness_fd is not None:
        liveness = LivenessWriter(LivenessPage(liveness_fd))
        os.close(liveness_fd)
        liveness.start()
    status = asyncio.run(
        _serve(load, reader_fd, writer_fd, stats_seconds, liveness, dialect=dialect)
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that hangs inside the engine, or still loads it, must not keep the process alive.
    os._exit(status)


async def _serve(
    load: Load,
    reader_fd: int,
    writer_fd: int,
    stats_seconds: float,
    liveness: LivenessWriter | None,
    *,
    dialect: Dialect,
) -> int:
    reader, writer = await open_wire(reader_fd, writer_fd)
    return await _Process(load, reader, writer, stats_seconds, liveness, dialect=dialect).run()


class _Process:
    """One engine and its requests in flight."""

    def __init__(
        self,
        load: Load,
        reader: asyncio.StreamReader,
        writer: FrameWriter,
        stats_seconds: float,
        liveness: LivenessWriter | None,
        *,
        dialect: Dialect,
    ) -> None:
        self._dialect = dialect
        self._reader = reader
        self._writer = writer
        self._stats_seconds = stats_seconds
        self._liveness = liveness
        self._loop = asyncio.get_running_loop()
        self._fetched: Future[Mapping[str, str]] = Future()
        self._loaded = asyncio.wrap_future(in_thread(lambda: load(self._fetched.result)))
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> int:
        """Serve until either side ends, and return the exit status."""
        parts: set[asyncio.Future[None]] = {
            self._loop.create_task(self._listen()),
            self._loop.create_task(self._report()),
            self._broken,
        }
        if self._liveness is not None:
            parts.add(self._loop.create_task(self._count_turns(self._liveness)))
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        failure = next((part.exception() for part in done if part.exception()), None)
        for part in [*parts, *self._tasks.values()]:
            part.cancel()
        if failure is not None:
            await self._send_failure(failure)
        await self._close()
        return 0 if failure is None else EXIT_FAILED

    async def _listen(self) -> None:
        """Start and abort requests until the pipe ends."""
        reader = FrameReader(self._reader)
        while frames := await reader.read():
            for frame in frames:
                self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        match frame:
            case Run():
                self._start(frame.ticket, self._run_line(frame))
            case Ask():
                self._start(frame.ticket, self._answer(frame))
            case Abort():
                if task := self._tasks.get(frame.ticket):  # otherwise its row is being sent
                    task.cancel()
            case Fetched() if not self._fetched.done():
                self._fetched.set_result(frame.folders)
            case _:
                raise FrameError(f"a {type(frame).__name__} frame must not be sent to an engine")

    async def _count_turns(self, liveness: LivenessWriter) -> None:
        """Count iterations of the event loop."""
        while True:
            liveness.turns += 1
            await asyncio.sleep(_TURN_SECONDS)

    async def _report(self) -> None:
        """Send `Ready` once the model is loaded, then statistics."""
        served = await self._loaded
        if self._liveness is not None:
            self._liveness.follow(served.stats)
        await self._send(Ready(served.info()))
        while True:
            await self._send(Stats(served.stats()))
            await asyncio.sleep(self._stats_seconds)

    def _start(self, ticket: int, answering: Coroutine[Any, Any, None]) -> None:
        def finish(task: asyncio.Task[None]) -> None:
            del self._tasks[ticket]
            if task.cancelled() or (failure := task.exception()) is None:
                return
            if not self._broken.done():
                self._broken.set_exception(failure)

        task = self._tasks[ticket] = self._loop.create_task(answering)
        task.add_done_callback(finish)

    async def _answer(self, ask: Ask) -> None:
        await answer_request(await asyncio.shield(self._loaded), ask, self._send)

    async def _run_line(self, run: Run) -> None:
        answered = await run_line(
            RawLine(run.number, run.data),
            await asyncio.shield(self._loaded),  # aborting a request must not end the loading
            created=run.created,
            dialect=self._dialect,
            max_row_bytes=MAX_ROW_BYTES,
        )
        usage = answered.usage or Usage()
        await self._send(Row(run.ticket, answered.is_success, usage, answered.row))

    async def _send(self, frame: Frame) -> None:
        # Drain before the write instead of after it: while rows stream, the pipe may stay full, and
        # a task that waited after its write would hold its row until the stream ends.
        await self._writer.drain()
        self._writer.write(frame)
        if not isinstance(frame, Row):  # parts of a stream are sent one by one
            self._writer.flush()

    async def _send_failure(self, failure: BaseException) -> None:
        if isinstance(failure, EngineError):
            words, code = str(failure), failure.code
        else:
            words, code = f"{type(failure).__name__}: {failure}", EngineError.code
            logger.error("the engine has failed", exc_info=failure)
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._send(Failed(words, code))
                self._writer.close()
                await self._writer.wait_closed()

    async def _close(self) -> None:
        if not self._loaded.done() or self._loaded.cancelled() or self._loaded.exception():
            return
        closing = asyncio.wrap_future(in_thread(self._loaded.result().close))
        await asyncio.wait([closing], timeout=_FAREWELL_SECONDS)


def in_thread(make: Callable[[], _Result]) -> Future[_Result]:
    """Run a function in a daemon thread, which, unlike an executor's, is not joined at exit."""
    result: Future[_Result] = Future()

    def work() -> None:
        result.set_running_or_notify_cancel()  # no longer cancellable
        try:
            result.set_result(make())
        except BaseException as exc:  # noqa: BLE001 - raised again by `result.result`
            result.set_exception(exc)

    threading.Thread(target=work, daemon=True).start()
    return result
