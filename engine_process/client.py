"""Engine client: runs the engine in a child process and survives its death.

The child's side is `engine_process.child`, the wire between them `engine_process.frames`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TypeAlias

from tidemill.batch.errors import HandlerError
from tidemill.protocol.contract import EngineInfo, EngineStats
from tidemill.protocol.stall import StallClock

from .frames import (
    Abort,
    Answer,
    AnswerKind,
    Ask,
    Failed,
    Fetched,
    Frame,
    FrameError,
    FrameReader,
    Ready,
    Row,
    Run,
    Stats,
    open_wire,
)
from .liveness import STACKS_SIGNAL, LivenessPage

# The code of a failure that no request can have caused: engine.errors.MachineFailed.
MACHINE_FAILED = "machine_failed"
_STACKS_SECONDS = 0.5
_CLOSE_SECONDS = 8.0
_EXIT_SECONDS = 5.0
_DRAIN_BYTES = 2**16

_Forget: TypeAlias = Callable[["asyncio.Future[Row]"], None]


class EngineFailed(HandlerError):
    """The engine could not be started; `code` is the engine's own, if it sent one."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class EngineDied(HandlerError):
    """The engine's process has ended, or was killed because it stalled.

    The requests in flight have no row, and one of them may be the cause, unless the engine itself
    reports that its machine `is_broken`. A later request was not sent.
    """

    code = "engine_died"

    def __init__(self, reason: str, *, is_broken: bool = False, was_sent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_broken = is_broken
        self.was_sent = was_sent


class EngineClient:
    """Client of one engine process, from `start` to its death or `close`; it starts once.

    `command` starts it; the descriptors of two pipes and of the liveness page are appended. Start
    it from a thread that lives as long as the process should: on Linux the engine dies with that
    thread. If the command contains weights by URL, `folders` resolves to the folder of each, once
    they are fetched. Its standard error is this process's, or the descriptor `stderr`, which is
    closed once the process has it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stall_seconds: float,
        start_seconds: float,
        folders: asyncio.Future[Mapping[str, str]] | None = None,
        stderr: int | None = None,
    ) -> None:
        self._command = command
        self._stall_seconds = stall_seconds
        self._start_seconds = start_seconds
        self._folders = folders
        self._stderr = stderr
        self._stats = EngineStats()
        self._progress = 0  # grows with each sign of work
        self._tickets = count(1)
        self._pending: dict[int, tuple[asyncio.Future[Row], _Forget]] = {}
        self._exchanges: dict[int, asyncio.Queue[Answer | EngineDied]] = {}
        self._unsent: set[int] = set()  # tickets of requests since the pipe was closed
        self._reason: str | None = None  # why this client killed the process
        self._failed: Failed | None = None  # why the process ended by itself
        self._death: str | None = None
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def stats(self) -> EngineStats:
        """Return the last statistics of the engine."""
        return self._stats

    @property
    def pid(self) -> int:
        """Return the id of the process, once started."""
        return self._process.pid

    @property
    def death(self) -> str | None:
        """Return the reason why the process has ended; None while it lives."""
        return self._death

    @property
    def inflight(self) -> int:
        """Return the number of requests in flight."""
        return len(self._pending) + len(self._exchanges)

    async def start(self) -> EngineInfo:
        """Start the process; return the engine's info once the model is loaded.

        Raises EngineFailed if it cannot be loaded, dies or takes longer than `start_seconds`, not
        counting the time in which weights are fetched.
        """
        try:
            await self._spawn()
        except OSError as exc:
            raise EngineFailed(f"cannot be started: {exc}", code="engine_not_started") from exc
        try:
            await self._send_folders()
            async with asyncio.timeout(self._start_seconds):
                info = await self._ready
        except TimeoutError as exc:
            await self._print_stacks()
            raise EngineFailed(
                f"the model was not loaded within {self._start_seconds:g} s",
                code="engine_start_timeout",
            ) from exc
        else:
            self._watching = asyncio.create_task(self._watch())
            return info
        finally:
            if self._watching is None:
                self._ready.cancel()
                self._kill("not loaded")
                await self.close()

    def fetch_row(self, number: int, created: int, data: bytes) -> asyncio.Future[Row]:
        """Return a future of the row of request line `number` with these bytes.

        Cancelling it aborts the request. Raises FrameError for a line that is too long to send, and
        EngineDied, which the future also raises, if there will be no row.
        """
        if self._death is not None:
            raise self._died(self._death, was_sent=False)
        ticket = next(self._tickets)
        self._send(ticket, Run(ticket, number, created, data))
        answered: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        forget = partial(self._forget, ticket)
        self._pending[ticket] = answered, forget
        answered.add_done_callback(forget)
        return answered

    async def ask(
        self, request: bytes, created: int, *, is_online: bool
    ) -> AsyncGenerator[Answer, None]:
        """Yield the frames of the answer to a request of `exchange.encode_request`.

        Leaving the iterator before the last frame aborts the request. Raises EngineDied if there
        will be no further frame, and FrameError for a request that is too long to send.
        """
        if self._death is not None:
            raise self._died(self._death, was_sent=False)
        ticket, is_over = next(self._tickets), False
        answers = self._exchanges[ticket] = asyncio.Queue[Answer | EngineDied]()
        try:
            self._send(ticket, Ask(ticket, created, is_online, request))
            with suppress(ConnectionError):  # `answers` gets the reason
                await self._writer.drain()
            while not is_over:
                answer = await answers.get()
                is_over = isinstance(answer, EngineDied) or answer.kind is not AnswerKind.CHUNK
                if isinstance(answer, EngineDied):
                    raise answer
                yield answer
        except FrameError:
            is_over = True
            raise
        finally:
            del self._exchanges[ticket]
            if not is_over:
                self._abort(ticket)

    def _send(self, ticket: int, frame: Run | Ask) -> None:
        """Send a request, or leave it unsent until the process, which is ending, has ended.

        Its end shows whether the machine is at fault.
        """
        if self._writer.is_closing():
            self._unsent.add(ticket)
        else:
            self._writer.write(frame)

    def _forget(self, ticket: int, answered: asyncio.Future[Row]) -> None:
        """Forget a request that has ended without a row, and abort it if it was cancelled."""
        del self._pending[ticket]
        if answered.cancelled():
            self._abort(ticket)

    def _abort(self, ticket: int) -> None:
        """Abort a request, unless the process has ended."""
        if self._death is None:
            self._writer.write(Abort(ticket))

    async def close(self) -> None:
        """End the process, with SIGKILL if it does not exit by itself. Idempotent."""
        if self._listening is None:
            return
        self._reason = self._reason or "closed"
        self._writer.close()
        await asyncio.wait([self._listening], timeout=_CLOSE_SECONDS)
        self._kill("closed")
        await asyncio.wait([self._listening], timeout=_EXIT_SECONDS)

    async def _spawn(self) -> None:
        liveness = LivenessPage.new_fd()
        child_reader, writer = os.pipe()
        reader, child_writer = os.pipe()
        self._page = LivenessPage(liveness)
        wire, self._writer = await open_wire(reader, writer)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                f"--reader-fd={child_reader}",
                f"--writer-fd={child_writer}",
                f"--liveness-fd={liveness}",
                pass_fds=(child_reader, child_writer, liveness),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=self._stderr,
                # A separate process group: signals to the worker do not reach it, and this client's
                # signals also reach its children.
                start_new_session=True,
            )
        except BaseException:
            self._writer.close()
            raise
        finally:
            for fd in (child_reader, child_writer, liveness, self._stderr):
                if fd is not None:
                    os.close(fd)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen(wire))

    async def _send_folders(self) -> None:
        """Send the engine the folders of its weights once they are fetched, unless it has ended."""
        if self._folders is None:
            return
        await asyncio.wait((self._folders, self._ready), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self._writer.write(Fetched(self._folders.result()))

    async def _listen(self, wire: asyncio.StreamReader) -> None:
        """Handle frames until the process has ended, then fail all pending requests."""
        reason = "reading its frames failed"
        try:
            reason = await self._end_of(wire)
        finally:
            self._end(self._reason or reason)

    async def _end_of(self, wire: asyncio.StreamReader) -> str:
        """Handle frames until the process has ended, and return the reason."""
        reading = asyncio.create_task(self._read_frames(wire))
        exiting = asyncio.create_task(self._process.wait())
        both = [reading, exiting]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        self._writer.close()
        _, undone = await asyncio.wait(both, timeout=_EXIT_SECONDS)
        if undone:  # it is still running without its pipe, or a child of it holds the pipe
            self._kill("closed its pipe" if exiting in undone else None)
            await asyncio.wait(both)
        status = exiting.result()
        if self._failed is not None:
            return self._failed.message
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"

    async def _read_frames(self, wire: asyncio.StreamReader) -> None:
        reader = FrameReader(wire)
        try:
            while frames := await reader.read():
                for frame in frames:
                    self._handle_frame(frame)
        except FrameError as exc:
            if wire.at_eof():  # its death truncated the last frame
                return
            self._kill(f"broken wire: {exc}")
        except Exception as exc:  # noqa: BLE001 - its requests would wait forever
            self._kill(f"its frames cannot be read: {type(exc).__name__}: {exc}")
        else:
            return
        while await wire.read(_DRAIN_BYTES):
            pass  # read to the end of the pipe, which closes it

    def _handle_frame(self, frame: Frame) -> None:
        match frame:
            case Row():
                self._progress += 1
                pending = self._pending.get(frame.ticket)
                if pending is not None and not pending[0].done():
                    answered, forget = pending
                    del self._pending[frame.ticket]
                    answered.remove_done_callback(forget)  # it would cost a turn of the loop
                    answered.set_result(frame)
            case Answer():
                self._progress += 1
                exchange = self._exchanges.get(frame.ticket)
                if exchange is not None:
                    exchange.put_nowait(frame)
            case Stats():
                stats, before = frame.stats, self._stats
                self._progress += (stats.steps, stats.layers) != (before.steps, before.layers)
                self._stats = frame.stats
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(frame.info)
            case Failed():
                self._failed = frame
            case _:
                raise FrameError(f"a {type(frame).__name__} frame must not be sent to a worker")

    def _end(self, reason: str) -> None:
        self._death = reason
        if self._watching is not None:
            self._watching.cancel()
        if not self._ready.done():
            code = self._failed.code if self._failed else EngineDied.code
            self._ready.set_exception(EngineFailed(reason, code=code))
        for ticket, (answered, _) in self._pending.items():
            if not answered.done():
                was_sent = ticket not in self._unsent
                answered.set_exception(self._died(reason, was_sent=was_sent))
        for ticket, exchange in self._exchanges.items():
            exchange.put_nowait(self._died(reason, was_sent=ticket not in self._unsent))
        self._writer.abort_unread()  # frees requests that wait for an unread pipe

    def _died(self, reason: str, *, was_sent: bool = True) -> EngineDied:
        is_broken = self._failed is not None and self._failed.code == MACHINE_FAILED
        return EngineDied(reason, is_broken=is_broken, was_sent=was_sent)

    async def _watch(self) -> None:
        """Watchdog: kill an engine that has requests and makes no progress for `stall_seconds`."""
        try:
            await self._kill_stalled()
        except Exception as exc:  # noqa: BLE001 - without a watchdog it might hang forever
            self._kill(f"the watchdog failed: {type(exc).__name__}: {exc}")

    async def _kill_stalled(self) -> None:
        clock, reason = StallClock(self._stall_seconds), None
        while reason is None:
            await asyncio.sleep(clock.tick_seconds)
            life = self._page.read()
            reason = clock.note_tick(
                self.inflight,
                (self._progress, life.steps, life.layers),
                beats=life.beats,
                turns=life.turns,
            )
        self._reason = f"stalled: {reason}"
        await self._print_stacks()
        self._kill(self._reason)
        assert self._listening is not None
        _, alive = await asyncio.wait([self._listening], timeout=_EXIT_SECONDS)
        if alive:  # a driver holds the process, so SIGKILL must wait
            self._end(f"{self._reason}; its process {self.pid} cannot be killed")

    async def _print_stacks(self) -> None:
        """Make the process print the stacks of its threads to its standard error."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_SECONDS)

    def _kill(self, reason: str | None) -> None:
        """Kill the process and its children; `reason` is None if it ended by itself."""
        if self._listening is None or self._listening.done():
            return
        self._reason = self._reason or reason
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
