"""Data parallelism of a run: several engine processes share the lines of one file.

Lines that begin alike go to one engine, whose prefix cache has their beginning, as long as it has
little more to do than the others; at the end of the file an engine that is idle takes lines that
wait for another. An engine that dies is started again, and its lines go on elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Final

from tidemill.batch.file.lines import LineError, parse_line
from tidemill.batch.file.rows import print_malformed, print_not_run, row_error_message
from tidemill.batch.file.run_line import LineResult
from tidemill.handler.worker.engine_client import EngineDied
from tidemill.handler.worker.engine_process.frames import FrameError, Row
from tidemill.protocol.contract import EngineInfo, EngineStats
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.stall import STALL_SECONDS

from ..engine.replicas import Replica, Replicas, Sent
from ..files.input_file import PlacedLine

_MAX_DEATHS_OF_A_LINE: Final = 2
_KILLED = "This line was in an engine that ended, twice: it was not tried again."


class _Moved(Exception):
    """A line that waits for one engine is to go to another."""


class EngineReplicas:
    """Engine processes behind one door; `Served`, but for its lines. Started inside a loop.

    `home` returns a number for a line's place, the same for lines that begin alike.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        created: int,
        home: Callable[[int], int],
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._replicas = Replicas(commands, stall_seconds=stall_seconds)
        self._created = created
        self._home = home

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start all processes and end them; raises EngineError where one cannot load."""
        self._suspects = asyncio.Lock()
        async with self._replicas.started():
            yield

    @property
    def load_seconds(self) -> float:
        """Seconds that the start of all has taken."""
        return self._replicas.load_seconds

    def info(self) -> EngineInfo:
        """Return the info of all together."""
        return self._replicas.info()

    def stats(self) -> EngineStats:
        """Return the sums over all engines; the KV cache's usage is the mean."""
        return self._replicas.stats()

    def close(self) -> None:
        """Do nothing: `started` has ended the processes."""

    async def run_line(self, line: PlacedLine) -> LineResult:
        """Return the row of a line; raises EngineError where no engine can go on."""
        raw, deaths = line.raw, 0
        if raw.overlong is not None:
            return _malformed(line)
        while deaths < _MAX_DEATHS_OF_A_LINE:
            # One of several suspects ends an engine: one at a time tells which.
            turn: AbstractAsyncContextManager[object] = self._suspects if deaths else nullcontext()
            async with turn:
                replica = await self._replicas.choose(self._home(line.place))
                client = replica.client
                try:
                    row = await self._fetch_row(replica, line)
                except _Moved:
                    continue
                except FrameError as exc:
                    return _not_run(line, "too_long", f"This line is too long: {exc}.")
                except EngineDied as exc:
                    deaths += not exc.is_broken
                    self._replicas.restart(replica, client, exc)
                    continue
            self._replicas.note_row()
            self._balance()
            return _result_of(row)
        return _not_run(line, "engine_died", _KILLED)

    async def _fetch_row(self, replica: Replica, line: PlacedLine) -> Row:
        """Return the row of a line; raises EngineDied, FrameError, and _Moved."""
        assert replica.client is not None
        raw = line.raw
        fetching = asyncio.ensure_future(
            replica.client.fetch_row(raw.number, self._created, raw.data)
        )
        sent = Sent(fetching)
        with replica.holding(sent):
            try:
                return await fetching
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if sent.is_moved and not (task is not None and task.cancelling()):
                    raise _Moved from None
                raise

    def _balance(self) -> None:
        """Give lines that wait for the busiest engine to the idlest, half of what it has more."""
        ready = self._replicas.ready
        idlest = min(ready, key=lambda one: len(one.sent), default=None)
        busiest = max(ready, key=lambda one: len(one.sent), default=None)
        if idlest is None or busiest is None or idlest.num_waiting >= 0:
            return
        count = min(busiest.num_waiting, (len(busiest.sent) - len(idlest.sent)) // 2)
        if count > 0:
            busiest.give_up(count)


def _malformed(line: PlacedLine) -> LineResult:
    """Return the row of a line that is too long to be one."""
    try:
        parse_line(line.raw)
    except LineError as exc:
        return LineResult(
            print_malformed(line.raw.digest, exc), is_success=False, failure=exc.message
        )
    raise AssertionError


def _result_of(row: Row) -> LineResult:
    failure = None if row.is_success else row_error_message(load_json(row.row))
    return LineResult(row.row, row.is_success, row.usage, failure)


def _not_run(line: PlacedLine, code: str, message: str) -> LineResult:
    row = print_not_run(line.raw.digest, None, code=code, message=message)
    return LineResult(row, is_success=False, failure=message)
