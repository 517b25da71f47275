"""Lines into the engine and rows out of it, in input order, with bounded look-ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cli.errors import OutputLost
from cli.files.resume import ROWS_PER_WRITE
from cli.files.spill import Spill, Waiting
from cli.files.writing import Row, RowWriter
from cli.running.tally import Tally
from engine.batchfile.answer import Answer, run_line
from engine.batchfile.lines import RawLine
from engine.batchfile.rows import Dialect
from engine.contract import Responder
from engine.errors import EngineError

MAX_HELD_BYTES = 64 * 2**20
SPILL_SECONDS = 5.0
"""So often rows that wait for their order are spilled: a process that is killed loses no more."""

_LINES_PER_TURN = 64
_CANCEL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """How far the feed looks ahead: requests not yet answered, and bytes of requests and rows.

    A slow first request holds back the rows behind it; their bytes, not their number, are bounded,
    so that the engine stays full while they wait.
    """

    max_inflight: int
    max_held_bytes: int = MAX_HELD_BYTES


class _Slot:
    """The place of one line in the output; `row` is None until it has been answered."""

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
    500 row; EngineError, which says that nothing can be answered any more, and errors of the output
    end the run.
    """

    def __init__(
        self,
        responder: Responder,
        writer: RowWriter,
        tally: Tally,
        *,
        created: int,
        window: Window,
        dialect: Dialect = "openai",
        spill: Spill | None = None,
    ) -> None:
        self._responder = responder
        self._writer = writer
        self._tally = tally
        self._created = created
        self._window = window
        self._dialect = dialect
        self._spill = spill
        self._loop = asyncio.get_running_loop()
        self._slots: deque[_Slot] = deque()
        self._num_inflight = 0
        self._held_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_stopped = False
        self._fatal: EngineError | None = None

    def stop(self) -> None:
        """Admit no more; `run` then returns. May be called from a signal handler."""
        self._is_stopped = True
        self._loop.call_soon_threadsafe(self._wake)

    async def run(self, lines: Iterable[RawLine]) -> bool:
        """Answer the lines and write their rows; return whether all were done, none stopped.

        However it ends, the rows that are finished and in order have been written, and those that
        wait for their order are spilled.
        """
        spilling = self._loop.create_task(self._spill_often())
        is_lost = False
        try:
            await self._answer_all(lines)
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

    async def _answer_all(self, lines: Iterable[RawLine]) -> None:
        for admitted, raw in enumerate(lines):
            await self._room_for(len(raw.data))
            if self._is_stopped:
                break
            self._admit(raw)
            if admitted % _LINES_PER_TURN == 0:
                # Lets the requests start, and rows leave while there is still room.
                await asyncio.sleep(0)
                self._look()
        while self._look() and not self._is_stopped:
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

    async def _room_for(self, num_bytes: int) -> None:
        while not self._has_room(num_bytes) and not self._is_stopped:
            self._look()
            if self._has_room(num_bytes):
                break
            await self._sleep()

    def _has_room(self, num_bytes: int) -> bool:
        if not self._slots:
            return True
        return (
            self._num_inflight < self._window.max_inflight
            and self._held_bytes + num_bytes <= self._window.max_held_bytes
        )

    def _admit(self, raw: RawLine) -> None:
        slot = _Slot(raw.number, len(raw.data))
        self._slots.append(slot)
        self._held_bytes += slot.held_bytes
        self._num_inflight += 1
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

    def _finish(self, slot: _Slot, answered: Answer, number: int) -> None:
        self._held_bytes += len(answered.row) - slot.held_bytes
        slot.held_bytes = len(answered.row)
        slot.row = answered.row
        slot.is_success = answered.is_success
        slot.task = None
        self._num_inflight -= 1
        self._tally.count(answered.usage, failure=answered.failure, line=number)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _sleep(self) -> None:
        """Wait until something is answered or stopped; there must be something to wait for."""
        self._waiter = self._loop.create_future()
        await self._waiter
        self._waiter = None

    def _look(self) -> bool:
        """Write what is in order and say whether anything is left; raise what ends the run."""
        self._flush()
        if self._fatal is not None:
            raise self._fatal
        return bool(self._slots)

    def _flush(self) -> None:
        """Write the finished rows at the head, `ROWS_PER_WRITE` at a time."""
        slots = self._slots
        while slots and slots[0].row is not None:
            rows: list[Row] = []
            while slots and len(rows) < ROWS_PER_WRITE and (row := slots[0].row) is not None:
                slot = slots.popleft()
                self._held_bytes -= slot.held_bytes
                rows.append((row, slot.is_success))
            self._writer.write(rows)
            self._tally.written += len(rows)

    async def _cancel(self) -> None:
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
