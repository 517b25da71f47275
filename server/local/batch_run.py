"""Batch run: sends lines without a row through the engine and makes finished rows durable."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tidemill.batch.file.formats import HEAD_BYTES, detect_format, open_lines
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.file.run_line import run_line
from tidemill.batch.file.throughput import RateWindow
from tidemill.batch.model import Batch
from tidemill.batch.parts import FinishedRow
from tidemill.protocol.contract import Responder, Usage
from tidemill.protocol.in_flight import InFlightLimiter
from tidemill.protocol.in_thread import in_thread_if_long
from tidemill.protocol.json_bodies import unfolded_bytes

from .rows import Rows

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields

FLUSH_SECONDS = 2.0
_FLUSH_BYTES = 4 * 2**20
_READ_LINES = 32
_STARTS_PER_OTHER = 8


class LineTurns:
    """Order in which lines of batches start: the lowest priority first, except one of eight lines.

    That line is of the batch that has waited longest, so that every batch makes progress. Batches
    of one priority start lines side by side.
    """

    def __init__(self) -> None:
        self._readers = Counter[int]()  # batches with lines to start, by priority
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._num_started = 0

    @contextmanager
    def reading(self, priority: int) -> Iterator[None]:
        """Count a batch that starts lines while entered."""
        self._readers[priority] += 1
        try:
            yield
        finally:
            self._readers[priority] -= 1
            self._readers += Counter()  # drops zeros
            self._pass_on()

    async def wait(self, priority: int) -> None:
        """Wait until the next line of a batch that is `reading` may start."""
        if priority > min(self._readers):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((priority, turn))
            await turn
            return
        self._num_started += 1
        if self._waiters and not self._num_started % (_STARTS_PER_OTHER - 1):
            self._pass_on(num_others=1)

    def _pass_on(self, num_others: int = 0) -> None:
        """Start waiting lines that have the lowest priority, and the oldest others."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            priority, turn = waiter
            is_first = not self._readers or priority <= min(self._readers)
            if turn.done():  # cancelled
                continue
            if is_first or num_others:
                num_others -= not is_first
                turn.set_result(None)
            else:
                self._waiters.append(waiter)


class BatchRun:
    """Runs one batch through the engine; every reply contains the time of its creation."""

    def __init__(
        self,
        path: Path,
        rows: Rows,
        engine: Responder,
        in_flight: InFlightLimiter,
        batch: Batch,
        *,
        turns: LineTurns,
        echo: EchoedFields | None = None,
    ) -> None:
        self._path = path
        self._rows = rows
        self._engine = engine
        self._in_flight = in_flight
        self._batch = batch
        self._turns = turns
        self._echo = echo
        self._unflushed: list[FinishedRow] = []
        self._unflushed_bytes = 0
        self._not_durable: dict[int, None] = {}  # lines, in their order
        self._last_line = 0
        self._times = (0.0, 0.0)  # of the first row's beginning and the last one's end
        self._has_many = asyncio.Event()
        self._flush_lock = asyncio.Lock()
        self.pace = RateWindow(time.monotonic)
        self.is_closed = False

    @property
    def complete_through(self) -> int:
        """Return the last line up to which every line has a durable row, or will never get one."""
        return next(iter(self._not_durable), self._last_line + 1) - 1

    async def run(self) -> None:
        """Run every line that has no row; a cancel leaves no request in flight.

        `flush` makes the rows finished by then durable. Raises EngineError, FormatError, OSError.
        """
        try:
            # Closed on exit, even while a thread still reads from it.
            with self._path.open("rb") as file:
                await self._run_lines(lines_without_row(file, self._rows, self._batch.endpoint))
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from None

    async def _run_lines(self, lines: Iterator[RawLine]) -> None:
        async with asyncio.TaskGroup() as group:
            priority = self._batch.priority
            # In the thread too: weighing a long line takes a while.
            weighed = ((raw, _held_bytes(raw)) for raw in lines)
            with self._turns.reading(priority):
                while some := await asyncio.to_thread(list, islice(weighed, _READ_LINES)):
                    for raw, held in some:
                        self._not_durable[raw.number] = None
                        self._last_line = raw.number
                        await self._turns.wait(priority)
                        await self._in_flight.acquire(held)
                        group.create_task(self._run_line(raw, held))
                        await asyncio.sleep(0)  # lets other batches and interactive requests run

    async def wait_until_due(self) -> None:
        """Wait until the next flush: a few seconds, or until many bytes are unflushed."""
        self._has_many.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._has_many.wait()

    async def flush(self) -> None:
        """Make finished rows durable; after an exception the call is repeated.

        Cancelling the caller does not cancel the write.
        """
        await asyncio.shield(asyncio.ensure_future(self._flush()))

    async def _flush(self) -> None:
        async with self._flush_lock:
            rows = self._unflushed[:]
            if not rows or self.is_closed:
                return
            await asyncio.to_thread(self._rows.append, rows, times=self._times)
            del self._unflushed[: len(rows)]
            for row in rows:
                del self._not_durable[row.line]
            self._release_bytes(sum(len(row.row) for row in rows))
            self.pace.add(len(rows), sum((row.usage for row in rows), start=Usage()))

    async def close(self) -> None:
        """Discard finished rows that are not durable, and accept no more.

        A task that outlives this run cannot write while the batch's next run does.
        """
        async with self._flush_lock:
            self.is_closed = True
            self._unflushed.clear()
            self._release_bytes(self._unflushed_bytes)

    def _release_bytes(self, num_bytes: int) -> None:
        self._unflushed_bytes -= num_bytes
        self._in_flight.release_bytes(num_bytes)

    async def _run_line(self, raw: RawLine, held: int) -> None:
        began_at = self._times[0] or round(time.time(), 3)
        self._times = (began_at, self._times[1])
        try:
            answer = await run_line(
                raw, self._engine, created=self._batch.created_at, with_expected=True
            )
            if (echo := self._echo) is not None:
                printed = await in_thread_if_long(lambda _: echo.add_to(answer.row, raw), raw.data)
                answer = answer._replace(row=printed)
            if self.is_closed:
                return
            usage = answer.usage or Usage()
            row = FinishedRow(
                raw.number,
                answer.row,
                answer.is_success,
                usage,
                answer.expected,
                answer.is_reused,
            )
            held -= len(row.row)
            self._times = (began_at, round(time.time(), 3))
            self._unflushed.append(row)
            self._unflushed_bytes += len(row.row)
        finally:
            self._in_flight.release(held)
        if self._unflushed_bytes >= _FLUSH_BYTES:
            self._has_many.set()


def _held_bytes(raw: RawLine) -> int:
    """Return about how many bytes a line holds while its request runs."""
    return len(raw.data) + unfolded_bytes(raw.data)


def lines_without_row(file: BinaryIO, rows: Rows, url: str) -> Iterator[RawLine]:
    """Yield the lines of a file without a row, for a resumed batch; memory stays flat.

    `url` is the endpoint of requests that name none.
    """
    answered = rows.lines()
    next_answered = next(answered, None)
    form = detect_format(file.read(HEAD_BYTES), url)
    for raw in read_lines(open_lines(form, file)):
        if raw.number == next_answered:
            next_answered = next(answered, None)
        else:
            yield raw
