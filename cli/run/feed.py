"""Feed: runs lines through the engine and writes rows in input order, with backpressure."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import Dialect
from tidemill.batch.file.run_line import LineResult, run_line
from tidemill.protocol.contract import EngineError, Responder
from tidemill.protocol.in_flight import InFlightLimiter

from ..console.errors import OutputLost
from ..files.kept_rows import ROWS_PER_WRITE
from ..files.row_writer import Row, RowWriter
from ..files.spill import Spill, Waiting
from .tally import Tally

MAX_HELD_BYTES = 64 * 2**20
SPILL_SECONDS = 5.0
"""Interval of spilling rows out of order; a killed process loses no more than this."""

_LINES_PER_TURN = 64
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """Limits of the look-ahead: requests in flight, and bytes of requests and waiting rows.

    A slow request holds back the rows after it. Their bytes are bounded, not their number, so that
    the engine stays full meanwhile.
    """

    max_inflight: int
    max_held_bytes: int = MAX_HELD_BYTES


class _Slot:
    """The place of one line in the output; `row` is None until it is finished."""

    __slots__ = ("held_bytes", "is_success", "number", "row", "task")

    def __init__(self, number: int, held_bytes: int) -> None:
        self.number = number
        self.held_bytes = held_bytes
        self.row: bytes | None = None
        self.is_success = False
        self.task: asyncio.Task[None] | None = None


class Feed:
    """Runs lines through a responder. Made for one run, inside the event loop.

    Every reply carries `created` (seconds since the epoch). An exception of one request becomes its
    500 row; EngineError and errors of the output end the run.
    """

    def __init__(
        self,
        responder: Responder,
        writer: RowWriter,
        tally: Tally,
        *,
        created: int,
        limits: InFlightLimits,
        dialect: Dialect = "openai",
        spill: Spill | None = None,
    ) -> None:
        self._responder = responder
        self._writer = writer
        self._tally = tally
        self._created = created
        self._in_flight = InFlightLimiter(limits.max_held_bytes, limits.max_inflight)
        self._dialect = dialect
        self._spill = spill
        self._loop = asyncio.get_running_loop()
        self._slots: deque[_Slot] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._fatal: EngineError | None = None

    def stop(self) -> None:
        """Stop admitting lines; `run` then returns. May be called from a signal handler."""
        self._is_stopped = True
        self._loop.call_soon_threadsafe(self._wake)

    async def run(self, lines: Iterable[RawLine]) -> bool:
        """Run the lines and write their rows; return whether all are done.

        On any exit the finished rows in order have been written, and those out of order are
        spilled.
        """
        spilling = self._loop.create_task(self._spill_often())
        is_lost = False
        try:
            await self._run_lines(lines)
        except OutputLost:
            is_lost = True
            raise
        finally:
            await self._cancel()
            spilling.cancel()
            await asyncio.wait((spilling,))
            try:
                if not is_lost:
                    self._flush()
            finally:
                self._save_waiting()
        return not self._slots and not self._is_stopped

    async def _run_lines(self, lines: Iterable[RawLine]) -> None:
        for admitted, raw in enumerate(lines):
            if not await self._acquire(len(raw.data)):
                break
            self._start(raw)
            if admitted % _LINES_PER_TURN == 0:
                # Lets requests start and rows be written before the limits are reached.
                await asyncio.sleep(0)
                self._write_ready()
        while self._write_ready() and not self._is_stopped:
            await self._sleep()

    async def _spill_often(self) -> None:
        while self._spill is not None:
            await asyncio.sleep(SPILL_SECONDS)
            await asyncio.to_thread(self._spill.save, self._waiting())

    def _save_waiting(self) -> None:
        if self._spill is not None:
            self._spill.save(self._waiting())

    def _waiting(self) -> list[Waiting]:
        return [(slot.number, slot.row) for slot in self._slots if slot.row is not None]

    async def _acquire(self, num_bytes: int) -> bool:
        """Wait until a line of `num_bytes` is admitted; False if the feed is stopped first."""
        while not self._is_stopped:
            if self._in_flight.try_acquire(num_bytes):
                return True
            num_slots = len(self._slots)
            self._write_ready()
            if len(self._slots) == num_slots:  # nothing was written, so no bytes were released
                await self._sleep()
        return False

    def _start(self, raw: RawLine) -> None:
        slot = _Slot(raw.number, len(raw.data))
        self._slots.append(slot)
        slot.task = self._loop.create_task(self._fill(slot, raw))

    async def _fill(self, slot: _Slot, raw: RawLine) -> None:
        try:
            answered = await run_line(
                raw, self._responder, created=self._created, dialect=self._dialect
            )
        except EngineError as exc:
            self._fatal = self._fatal or exc
            self._wake()
        else:
            self._finish(slot, answered, raw.number)

    def _finish(self, slot: _Slot, answered: LineResult, number: int) -> None:
        self._in_flight.release(slot.held_bytes - len(answered.row))
        slot.held_bytes = len(answered.row)
        slot.row = answered.row
        slot.is_success = answered.is_success
        slot.task = None
        self._tally.count(answered.usage, failure=answered.failure, line=number)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _sleep(self) -> None:
        """Wait until a request finishes or `stop`; there must be one in flight."""
        self._waiter = self._loop.create_future()
        await self._waiter
        self._waiter = None

    def _write_ready(self) -> bool:
        """Write rows in order and say whether lines are left; raises the engine's error."""
        self._flush()
        if self._fatal is not None:
            raise self._fatal
        return bool(self._slots)

    def _flush(self) -> None:
        """Write the finished rows at the head of the queue, `ROWS_PER_WRITE` at a time."""
        slots = self._slots
        while slots and slots[0].row is not None:
            rows: list[Row] = []
            while slots and len(rows) < ROWS_PER_WRITE and (row := slots[0].row) is not None:
                slot = slots.popleft()
                self._in_flight.release_bytes(slot.held_bytes)
                rows.append((row, slot.is_success))
            self._writer.write(rows)
            self._tally.written += len(rows)

    async def _cancel(self) -> None:
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
