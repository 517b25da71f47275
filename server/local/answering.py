"""The lines of one batch, answered: those without a row go to the engine, rows become durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from engine.backpressure import InFlight
from engine.batchfile.answer import run_line
from engine.batchfile.forms import HEAD_BYTES, form_of, open_lines
from engine.batchfile.lines import RawLine, read_lines
from engine.batchfile.pace import Pace
from engine.contract import Responder, Usage
from engine.protocol.json_bodies import unfolded_bytes
from handler.batch.parts import FinishedRow
from server.local.rows import Rows

FLUSH_SECONDS = 2.0
_FLUSH_BYTES = 4 * 2**20
_READ_LINES = 32


class Answering:
    """One batch's run through the engine. Every reply carries `created`."""

    def __init__(
        self, path: Path, rows: Rows, engine: Responder, window: InFlight, created: int
    ) -> None:
        self._path = path
        self._rows = rows
        self._engine = engine
        self._window = window
        self._created = created
        self._unflushed: list[FinishedRow] = []
        self._unflushed_bytes = 0
        self._not_durable: dict[int, None] = {}  # lines, in their order
        self._last_line = 0
        self._has_many = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self.pace = Pace(time.monotonic)

    @property
    def complete_through(self) -> int:
        """Return a line up to which every line has a durable row, or has none and never will."""
        return next(iter(self._not_durable), self._last_line + 1) - 1

    async def run(self) -> None:
        """Answer every line that has no row; cancelled, it leaves nothing on its way.

        What is answered by then `flush` makes durable. Raises EngineError, FormError, OSError.
        """
        try:
            # Closed here, whatever a thread that still reads of it is at.
            with opened(self._path) as file:
                await self._answer_all(unanswered(file, self._rows))
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from None

    async def _answer_all(self, lines: Iterator[RawLine]) -> None:
        async with asyncio.TaskGroup() as group:
            # In a thread, too: how much a long line holds takes a while to tell.
            weighed = ((raw, _held_bytes(raw)) for raw in lines)
            while some := await asyncio.to_thread(list, islice(weighed, _READ_LINES)):
                for raw, held in some:
                    self._not_durable[raw.number] = None
                    self._last_line = raw.number
                    await self._window.enter(held)
                    group.create_task(self._answer(raw, held))
                    await asyncio.sleep(0)  # other batches have their turn, and people theirs

    async def due(self) -> None:
        """Wait until rows should become durable: a few seconds, less where there are many."""
        self._has_many.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._has_many.wait()

    async def flush(self) -> None:
        """Make durable what is answered; what it raises has changed nothing.

        Whoever stops waiting for it does not stop it.
        """
        await asyncio.shield(asyncio.ensure_future(self._flushed()))

    async def _flushed(self) -> None:
        async with self._one_at_a_time:
            rows = self._unflushed[:]
            if not rows:
                return
            await asyncio.to_thread(self._rows.append, rows)
            del self._unflushed[: len(rows)]
            for row in rows:
                del self._not_durable[row.line]
            self._drop_bytes(sum(len(row.row) for row in rows))
            self.pace.add(len(rows), sum((row.usage for row in rows), start=Usage()))

    def forget(self) -> None:
        """Give up what is answered and not durable."""
        self._unflushed.clear()
        self._drop_bytes(self._unflushed_bytes)

    def _drop_bytes(self, num_bytes: int) -> None:
        self._unflushed_bytes -= num_bytes
        self._window.release(num_bytes)

    async def _answer(self, raw: RawLine, held: int) -> None:
        try:
            answer = await run_line(raw, self._engine, created=self._created)
            row = FinishedRow(raw.number, answer.row, answer.is_success, answer.usage or Usage())
            held -= len(row.row)
            self._unflushed.append(row)
            self._unflushed_bytes += len(row.row)
        finally:
            self._window.leave()
            self._window.release(held)
        if self._unflushed_bytes >= _FLUSH_BYTES:
            self._has_many.set()


def _held_bytes(raw: RawLine) -> int:
    """Return about how many bytes a line holds while it is answered."""
    return len(raw.data) + unfolded_bytes(raw.data)


def opened(path: Path) -> BinaryIO:
    """Return the file of a batch's lines, open; raises OSError."""
    return path.open("rb")


def unanswered(file: BinaryIO, rows: Rows) -> Iterator[RawLine]:
    """Yield the lines of a file that have no row; memory stays flat."""
    answered = rows.lines()
    next_answered = next(answered, None)
    form = form_of(file.read(HEAD_BYTES))
    for raw in read_lines(open_lines(form, file)):
        if raw.number == next_answered:
            next_answered = next(answered, None)
        else:
            yield raw
