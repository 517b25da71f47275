"""Feed: runs lines through the engine and hands their rows to a writer, with backpressure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.batch.file.rows import Dialect
from tidemill.batch.file.run_line import LineResult, run_line
from tidemill.protocol.callback_failures import callback_failures
from tidemill.protocol.contract import Responder, Usage
from tidemill.protocol.in_flight import InFlightLimiter
from tidemill.protocol.in_thread import in_thread_if_long

from ..console.errors import failure_of
from ..console.terminal import log
from ..files.input_file import PlacedLine
from ..files.row_writer import RowWriter
from ..files.spool import Row
from .tally import Tally

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields

MAX_HELD_BYTES = 64 * 2**20
FLUSH_SECONDS = 5.0
"""Interval for flushing out-of-order rows; a killed process loses at most this much work."""

_LINES_PER_TURN = 256
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """Memory limits: requests in flight, and bytes of requests and unwritten rows."""

    max_inflight: int
    max_held_bytes: int = MAX_HELD_BYTES


RunLine = Callable[[PlacedLine], Awaitable[LineResult]]
"""Returns the row of a line; an exception, such as EngineError, ends the run."""


def line_runner(responder: Responder, *, created: int, dialect: Dialect = "openai") -> RunLine:
    """Return a runner of lines through a responder, with `created` (Unix seconds) in every reply.

    An exception in a request becomes its 500 row.
    """

    def run(line: PlacedLine) -> Awaitable[LineResult]:
        return run_line(line.raw, responder, created=created, dialect=dialect)

    return run


def echoing(run: RunLine, echo: EchoedFields) -> RunLine:
    """Return a runner of lines that adds the echoed fields to the rows of another."""

    async def run_and_add(line: PlacedLine) -> LineResult:
        result, raw = await run(line), line.raw
        row = await in_thread_if_long(lambda _: echo.add_to(result.row, raw), raw.data)
        return result._replace(row=row)

    return run_and_add


class _Turn:
    """Awaited: one turn of the loop, without the coroutine of `asyncio.sleep(0)`."""

    def __await__(self) -> Generator[None, None, None]:
        yield


_TURN = _Turn()


class Feed:
    """Runs lines through an engine; created for one run, inside the event loop.

    The first exception of a request, the output or a callback of the loop ends the run, so that
    exceptions are never dropped. `note_rows` is called with written or spooled rows: the places
    of their lines, and their numbers of completion tokens.
    """

    def __init__(
        self,
        runner: RunLine,
        writer: RowWriter,
        tally: Tally,
        *,
        limits: InFlightLimits,
        note_rows: Callable[[list[int], list[int]], None] = lambda _places, _tokens: None,
    ) -> None:
        self._run = runner
        self._writer = writer
        self._tally = tally
        self._in_flight = InFlightLimiter(limits.max_held_bytes, limits.max_inflight)
        self._note_rows = note_rows
        self._loop = asyncio.get_running_loop()
        self._lines: Iterator[PlacedLine] = iter(())
        self._next: PlacedLine | None = None  # the line to admit next
        self._workers: set[asyncio.Task[None]] = set()
        self._finished: list[tuple[PlacedLine, LineResult]] = []  # not yet passed to the writer
        self._waiter: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._is_cancelling = False
        self._fatal: BaseException | None = None

    def stop(self) -> None:
        """Stop admitting lines; `run` then returns. May be called from a signal handler."""
        self._is_stopped = True
        self._loop.call_soon_threadsafe(self._wake)

    async def run(self, lines: Iterable[PlacedLine]) -> bool:
        """Run the lines in order and write their rows; return whether all are done.

        On any exit, finished rows that are next in order have been written, and the others
        spooled. If the output fails, all finished rows that may be missing in it are spooled.
        """
        with callback_failures(self._fail):
            return await self._run_and_save(lines)

    async def _run_and_save(self, lines: Iterable[PlacedLine]) -> bool:
        flushing = self._loop.create_task(self._flush_often())
        flushing.add_done_callback(self._note_failure)
        try:
            is_done = await self._run_lines(lines)
            await self._cancel(flushing)
            self._write_all()
            self._raise_fatal()
        except BaseException as exc:
            self._fail(exc)  # a task that was not registered takes no more lines
            try:
                await self._cancel(flushing)
            finally:
                self._rescue()
            raise
        return is_done

    async def _run_lines(self, lines: Iterable[PlacedLine]) -> bool:
        self._lines, num_started = iter(lines), 0
        while not self._is_stopped:
            if (line := self._admit()) is not None:
                worker = self._loop.create_task(self._work(line))
                self._workers.add(worker)
                worker.add_done_callback(self._end)
                num_started += 1
                if num_started % _LINES_PER_TURN == 0:  # start requests before the limits
                    await self._turn()
                    while self._write() and not self._is_stopped:
                        await self._turn()  # those who answer at once take the next lines
            elif not self._write():
                if not self._workers:
                    return True
                await self._sleep()
        self._raise_fatal()
        return False

    async def _turn(self) -> None:
        """Let requests start and finish; raises the first failure."""
        await asyncio.sleep(0)
        self._raise_fatal()

    def _admit(self) -> PlacedLine | None:
        """Return the next line; None at the end, at the limits, and after a stop or a failure."""
        if self._is_stopped or self._fatal is not None:
            return None
        line = next(self._lines, None) if self._next is None else self._next
        if line is None or self._in_flight.try_acquire(len(line.raw.data)):
            self._next = None
            return line
        self._next = line
        return None

    async def _work(self, line: PlacedLine | None) -> None:
        """Run a line, and then others in the same task as long as the limits allow."""
        while line is not None:
            result = await self._run(line)
            self._finished.append((line, result))
            self._in_flight.release(len(line.raw.data) - len(result.row))
            self._wake()
            await _TURN  # rows are written before the next request, which may hang
            line = self._admit()

    async def _flush_often(self) -> None:
        """Flush spooled rows at intervals."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            self._writer.flush()

    def _end(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._note_failure(worker)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """Store the exception of a task that ended by itself, for `run` to raise."""
        failure = RuntimeError("a request was cancelled") if task.cancelled() else task.exception()
        if not self._is_cancelling:
            self._fail(failure)

    def _fail(self, exc: BaseException | None) -> None:
        self._fatal = self._fatal or exc
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _sleep(self) -> None:
        """Wait until a request finishes, or `stop` is called; raises the first failure.

        A request must be in flight.
        """
        self._waiter = self._loop.create_future()
        await self._waiter
        self._waiter = None
        self._raise_fatal()

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _write(self) -> bool:
        """Pass finished rows to the writer; return whether there was anything to write."""
        began = time.perf_counter()
        if finished := self._finished:
            self._writer.write(_rows(finished))
            self._finished = []
        is_more = self._writer.drain()
        self._tally.write_seconds += time.perf_counter() - began
        if finished:
            self._count(finished)
        return bool(finished) or is_more

    def _count(self, finished: list[tuple[PlacedLine, LineResult]]) -> None:
        tally, num_bytes, print_seconds = self._tally, 0, 0.0
        usages, places, tokens = list[Usage](), list[int](), list[int]()
        for (place, raw), (row, _, usage, failure, _, _, seconds) in finished:
            num_bytes += len(row)
            print_seconds += seconds
            if failure is not None:
                tally.count_failure(failure, raw.number)
            places.append(place)
            if usage is None:
                tokens.append(0)
            else:
                usages.append(usage)
                tokens.append(usage.completion_tokens)
        self._in_flight.release_bytes(num_bytes)
        tally.count_all(usages, len(finished))
        tally.print_seconds += print_seconds
        self._note_rows(places, tokens)

    def _write_all(self) -> None:
        while self._write():
            pass
        self._writer.flush()

    def _rescue(self) -> None:
        """Make finished rows durable after a failure, so that a resume finds them."""
        try:
            self._write_all()
        except BaseException:  # noqa: BLE001 - the caller raises the first failure
            try:
                self._writer.rescue(_rows(self._finished))
            except BaseException as exc:  # noqa: BLE001
                log(f"note: some finished rows could not be saved ({failure_of(exc)})")

    async def _cancel(self, flushing: asyncio.Task[None]) -> None:
        self._is_cancelling = True
        tasks = {flushing, *self._workers}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


def _rows(finished: list[tuple[PlacedLine, LineResult]]) -> list[tuple[PlacedLine, Row]]:
    new = tuple.__new__
    return [(line, new(Row, (result.row, result.is_success))) for line, result in finished]
