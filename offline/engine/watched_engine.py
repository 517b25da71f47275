"""Watched engine: an engine in this process whose calls fail when it makes no progress.

A hanging step cannot be stopped, only the process can. Therefore the calls that wait for the engine
fail, the command saves finished rows and exits, and the hanging thread is not joined.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar, cast

from tidemill.protocol.bodies import error_body
from tidemill.protocol.contract import (
    EngineError,
    EngineInfo,
    EngineStats,
    Online,
    Reply,
    Served,
    StreamedReply,
)
from tidemill.protocol.errors import RequestError
from tidemill.protocol.stall import STALL_SECONDS, START_SECONDS, StallClock

from ..console.errors import STACKS, EngineLost, failure_of
from ..console.signals import interruptible
from ..console.terminal import failures_noted, log, print_details
from .guard import Guard

CLOSE_SECONDS = 20.0
"""Limit for closing a healthy engine; its process exits anyway."""

END_SECONDS = 60.0
"""Limit for an orderly exit of this process after a stall."""

_T = TypeVar("_T")
_JOIN_SECONDS: Final = 5.0
_STDERR: Final = 2


@dataclass(frozen=True, slots=True)
class Watch:
    """Limits of an engine in this process, and how the process exits if one is exceeded.

    `advice` is a sentence that follows the reason. With `has_guard`, a second process kills this
    one if native code blocks all of its threads.
    """

    stall_seconds: float = STALL_SECONDS
    start_seconds: float = START_SECONDS
    advice: str = ""
    exit_status: int = 1
    has_guard: bool = False


class EngineStalled(EngineError):
    """The engine makes no progress; `stacks` are those of all threads."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.stacks = thread_stacks()


class LoadClock:
    """Ends the wait for a load that takes longer than `start_seconds`, not counting downloads."""

    def __init__(self, model: str, watch: Watch | None, guard: Guard | None) -> None:
        # Imported here: a signal during an import ends the process without a note on the output.
        from tidemill.engine.model.load_timing import is_downloading

        self._is_downloading = is_downloading
        self._model = model
        self._watch = watch
        self._guard = guard
        self._seconds = 0.0
        self.note_poll(0.0)

    def note_poll(self, seconds: float) -> None:
        """Count the time since the last poll; raises EngineLost."""
        if self._watch is None:
            return
        limit = self._watch.start_seconds
        if self._guard is not None:
            self._guard.beat(limit)
        if self._is_downloading():  # which has separate timeouts
            return
        self._seconds += seconds
        if self._seconds > limit:
            words = f"{self._model} has not loaded after {limit:g} s. {self._watch.advice}"
            raise EngineLost(words.strip(), details=thread_stacks())


class WatchedEngine:
    """A watched engine, whose calls raise EngineStalled once it makes no progress.

    The watchdog is a thread, because the event loop itself may hang. If the process has not exited
    some time after a stall, the thread ends it.
    """

    def __init__(self, engine: Served, watch: Watch, guard: Guard | None) -> None:
        self._engine = engine
        self._watch = watch
        self._guard = guard
        self._calls: dict[asyncio.Task[Any], int] = {}  # values: the threads of their loops
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._progress = self._turns = 0
        self._ended = threading.Event()
        self.failure: EngineStalled | None = None
        self._beat(watch.stall_seconds)
        self._thread = threading.Thread(target=self._run, name="tidemill-watch", daemon=True)
        self._thread.start()

    def respond(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Coroutine[Any, Any, Reply]:
        """Answer a line of a file."""
        self._check()
        return self._wait_for(self._engine.respond(url, body, request_id, created))

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer an interactive request, streamed if its body requests that."""
        self._check()
        online = cast("Online", self._engine)
        reply = await self._wait_for(online.answer(url, body, request_id, created))
        if isinstance(reply, Reply):
            return reply
        chunks = self._chunks(reply)
        await anext(chunks)
        return StreamedReply(chunks)

    def info(self) -> EngineInfo:
        """Return the engine's model, device and limits."""
        return self._engine.info()

    def stats(self) -> EngineStats:
        """Return the current stats; raises EngineStalled."""
        self._check()
        return self._engine.stats()

    def close(self) -> None:
        """Close the engine without waiting long for a hanging step."""
        try:
            if self.failure is None:
                with failures_noted("the engine cannot be closed"), suppress(TimeoutError):
                    interruptible(self._engine.close, _CloseClock().note_poll)
            else:  # its thread ends if the step ever ends
                threading.Thread(target=self._engine.close, daemon=True).start()
        finally:
            self._ended.set()
            self._thread.join(_JOIN_SECONDS)

    async def _chunks(self, reply: StreamedReply) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an empty chunk, then those of a stream; it ends with an error after a stall.

        Once the first chunk has been consumed, closing the generator always cancels the request.
        """
        async with aclosing(reply.chunks) as chunks:
            yield {}
            while True:
                try:
                    self._check()
                    chunk = await self._wait_for(anext(chunks, None))
                except EngineStalled as exc:
                    error = RequestError("The engine has stopped.", code=exc.code, status_code=503)
                    chunk = error_body(error)
                if chunk is None:
                    return
                yield chunk
                if self.failure is not None:
                    return

    async def _wait_for(self, answering: Awaitable[_T]) -> _T:
        """Await a call while the current task is registered as waiting; raises EngineStalled."""
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = threading.get_ident()
        try:
            return await answering
        except asyncio.CancelledError:
            if task in self._cancelled and not task.uncancel():
                self._check()
            raise
        finally:
            self._progress += 1
            del self._calls[task]
            self._cancelled.discard(task)

    def _run(self) -> None:
        """Watch the engine until it is closed; if watching fails, its calls fail."""
        try:
            self._watch_calls()
        except Exception as exc:  # noqa: BLE001 - unwatched, it might hang forever
            self._fail(f"the watchdog failed: {failure_of(exc)}")

    def _watch_calls(self) -> None:
        """Watch the engine until it is closed; fail its calls when it stalls."""
        clock, beats, turns = StallClock(self._watch.stall_seconds), 0, -1
        while not self._ended.wait(clock.tick_seconds):
            beats += 1
            self._beat(self._watch.stall_seconds)
            calls = self._calls.copy()
            is_blocked, turns = turns == self._turns, self._turns
            # Otherwise something else blocks the loop, such as the reader of the rows.
            is_engine = not is_blocked or _run_engine(calls.values())
            with suppress(EngineError):  # its calls also raise it
                stats = self._engine.stats()
                work = (self._progress, stats.steps, stats.layers)
                num_calls = len(calls) if is_engine else 0
                reason = clock.note_tick(num_calls, work, beats=beats, turns=turns)
                if reason is not None:
                    self._fail(f"{reason} (--stall-seconds)")
                    return
            for loop in {task.get_loop() for task in calls}:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._note_turn)

    def _beat(self, limit: float) -> None:
        if self._guard is not None:
            self._guard.beat(limit)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure from None

    def _note_turn(self) -> None:
        self._turns += 1

    def _fail(self, reason: str) -> None:
        """Make all calls raise EngineStalled, and end the process if it does not exit by itself."""
        self.failure = EngineStalled(reason)
        for loop in {task.get_loop() for task in self._calls.copy()}:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel_calls, loop)
        self._beat(2 * END_SECONDS)
        if self._ended.wait(END_SECONDS):
            return
        self._end_process(f"the engine has stopped: {reason}. {self._watch.advice}")

    def _cancel_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        for task in [task for task in self._calls.copy() if task.get_loop() is loop]:
            self._cancelled.add(task)
            task.cancel()

    def _end_process(self, words: str) -> NoReturn:
        # Not `sys.stderr`: another thread may be in the middle of a write.
        with suppress(OSError):
            os.write(_STDERR, f"tidemill: {words.strip()}\n{thread_stacks()}".encode())
        os._exit(self._watch.exit_status)


_CALLS: Final = {
    call.__code__
    for call in (
        WatchedEngine.respond,
        WatchedEngine.answer,
        WatchedEngine._wait_for,  # noqa: SLF001
        WatchedEngine._chunks,  # noqa: SLF001
    )
}


def _run_engine(threads: Iterable[int]) -> bool:
    """Return whether one of these threads is executing a call of a watched engine."""
    frames = sys._current_frames()  # noqa: SLF001 - documented
    for thread in threads:
        frame = frames.get(thread)
        while frame is not None:
            if frame.f_code in _CALLS:
                return True
            frame = frame.f_back
    return False


class _CloseClock:
    """Limits the wait for an engine that does not close."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def note_poll(self, seconds: float) -> None:
        """Count the time since the last poll; raises TimeoutError."""
        self._seconds += seconds
        if self._seconds > CLOSE_SECONDS:
            log(f"the engine has not closed after {CLOSE_SECONDS:g} s: exiting without it")
            print_details(thread_stacks())
            raise TimeoutError


def thread_stacks() -> str:
    """Return the stacks of all threads of this process; empty if they cannot be written."""
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return STACKS + file.read().decode(errors="replace")
    return ""
