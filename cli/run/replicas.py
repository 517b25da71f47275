"""Data parallelism: several engine processes share the lines of one file.

Lines that begin alike go to one engine, whose prefix cache has their beginning, as long as it has
little more to do than the others; at the end of the file an engine that is idle takes lines that
wait for another. An engine that dies is started again, and its lines go on elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from tidemill.batch.file.lines import LineError, parse_line
from tidemill.batch.file.rows import print_malformed, print_not_run, row_error_message
from tidemill.batch.file.run_line import LineResult
from tidemill.handler.worker.engine_client import EngineClient, EngineDied, EngineFailed
from tidemill.handler.worker.engine_process.frames import FrameError, Row
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.totals import total_info, total_stats

from ..console.terminal import log
from ..files.input_file import PlacedLine

_STALL_SECONDS: Final = 600.0
_START_SECONDS: Final = 3600.0
_MAX_DEATHS_OF_A_LINE: Final = 2
_MAX_DEATHS_WITHOUT_A_ROW: Final = 5
_MAX_RESTARTS: Final = 10
_HOME_LOAD: Final = 1.25
_CLOSE_SECONDS: Final = 0.1
_KILLED = "This line was in an engine that ended, twice: it was not tried again."


class _Moved(Exception):
    """A line that waits for one engine is to go to another."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A line in an engine."""

    row: asyncio.Task[Row]
    is_moved: bool = False


class _Replica:
    """One engine process, and the lines that it has; `client` is None while there is none."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.command = command
        self.client: EngineClient | None = None
        self._made: EngineClient | None = None
        self.num_restarts = 0
        self.info: EngineInfo | None = None
        self.sent: dict[_Sent, None] = {}

    async def start(self) -> None:
        """Start the process; raises EngineFailed."""
        self._made = EngineClient(
            self.command, stall_seconds=_STALL_SECONDS, start_seconds=_START_SECONDS
        )
        self.info = await self._made.start()
        self.client = self._made

    async def restart(self) -> None:
        """Start the process once more; raises EngineFailed, also where that was done too often."""
        self.num_restarts += 1
        if self.num_restarts > _MAX_RESTARTS:
            raise EngineFailed("it has ended too often", code=EngineDied.code)
        await self.start()

    async def close(self) -> None:
        """End the process, which may be starting."""
        if self._made is not None:
            await self._made.close()

    async def fetch_row(self, line: PlacedLine, created: int) -> Row:
        """Return the row of a line; raises EngineDied, FrameError, and _Moved."""
        assert self.client is not None
        fetching = self.client.fetch_row(line.raw.number, created, line.raw.data)
        sent = _Sent(asyncio.ensure_future(fetching))
        self.sent[sent] = None
        try:
            return await sent.row
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if sent.is_moved and not (task is not None and task.cancelling()):
                raise _Moved from None
            raise
        finally:
            del self.sent[sent]

    @property
    def num_waiting(self) -> int:
        """Number of its lines that cannot all be in one step."""
        return len(self.sent) - (0 if self.info is None else self.info.max_num_seqs)

    @property
    def slack(self) -> int:
        """Number of lines more than the others that cost little: a quarter of a step."""
        return max(1, 0 if self.info is None else self.info.max_num_seqs // 4)

    def give_up(self, count: int) -> None:
        """Give up the lines that came last."""
        for sent in [*self.sent][-count:]:
            sent.is_moved = True
            sent.row.cancel()


class EngineReplicas:
    """Engine processes behind one door; `Served`, but for its lines. Started inside a loop.

    `home` returns a number for a line's place, the same for lines that begin alike.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], *, created: int, home: Callable[[int], int]
    ) -> None:
        self._replicas = [_Replica(number, each) for number, each in enumerate(commands, 1)]
        self._created = created
        self._home = home
        self._deaths_without_a_row = 0
        self._restarts: set[asyncio.Task[None]] = set()
        self._failure: EngineError | None = None
        self.load_seconds = 0.0

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start all processes and end them; raises EngineError where one cannot load."""
        self._changed = asyncio.Condition()
        self._suspects = asyncio.Lock()
        began = time.monotonic()
        log(f"loading {len(self._replicas)} engines")
        try:
            # All of them, though one may have failed: a start that is cancelled leaves a process.
            starts = [one.start() for one in self._replicas]
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, EngineFailed):
                    raise EngineError(str(outcome)) from outcome
                if outcome is not None:
                    raise outcome
            self.load_seconds = time.monotonic() - began
            log(f"{len(self._replicas)} engines loaded in {self.load_seconds:.1f} s")
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        """End all processes; one that starts is ended, not waited for."""
        await asyncio.gather(*(one.close() for one in self._replicas))
        while self._restarts:
            await asyncio.wait(self._restarts, timeout=_CLOSE_SECONDS)
            await asyncio.gather(*(one.close() for one in self._replicas))

    def info(self) -> EngineInfo:
        """Return the info of all together."""
        return total_info([one.info for one in self._replicas if one.info is not None])

    def stats(self) -> EngineStats:
        """Return the sums over all engines; the KV cache's usage is the mean."""
        return total_stats([one.client.stats for one in self._replicas if one.client])

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
                replica = await self._choose(line.place)
                client = replica.client
                try:
                    row = await replica.fetch_row(line, self._created)
                except _Moved:
                    continue
                except FrameError as exc:
                    return _not_run(line, "too_long", f"This line is too long: {exc}.")
                except EngineDied as exc:
                    deaths += not exc.is_broken
                    self._replace(replica, client, exc)
                    continue
            self._deaths_without_a_row = 0
            self._balance()
            return _result_of(row)
        return _not_run(line, "engine_died", _KILLED)

    async def _choose(self, place: int) -> _Replica:
        """Return the engine of lines that begin alike, or the one with least to do."""
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                ready = [one for one in self._replicas if one.client is not None]
                if ready:
                    break
                await self._changed.wait()
        home = ready[self._home(place) % len(ready)]
        mean = sum(len(one.sent) for one in ready) / len(ready)
        if len(home.sent) <= _HOME_LOAD * mean + home.slack:
            return home
        return min(ready, key=lambda one: len(one.sent))

    def _balance(self) -> None:
        """Give lines that wait for the busiest engine to the idlest, half of what it has more."""
        ready = [one for one in self._replicas if one.client is not None]
        idlest = min(ready, key=lambda one: len(one.sent), default=None)
        busiest = max(ready, key=lambda one: len(one.sent), default=None)
        if idlest is None or busiest is None or idlest.num_waiting >= 0:
            return
        count = min(busiest.num_waiting, (len(busiest.sent) - len(idlest.sent)) // 2)
        if count > 0:
            busiest.give_up(count)

    def _replace(self, replica: _Replica, client: EngineClient | None, exc: EngineDied) -> None:
        """Start an engine again that has died, once."""
        if client is None or replica.client is not client:
            return
        replica.client = None
        self._deaths_without_a_row += 1
        if self._deaths_without_a_row > _MAX_DEATHS_WITHOUT_A_ROW:
            self._fail(f"engines keep ending, and no line has its row in between: {exc}")
            return
        log(f"engine {replica.number} has ended ({exc}): it is started again")
        restart = asyncio.create_task(self._restart(replica, client))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _restart(self, replica: _Replica, client: EngineClient) -> None:
        await client.close()
        try:
            await replica.restart()
        except EngineFailed as exc:
            log(f"engine {replica.number} is not started again: {exc}")
            if not self._is_any_left(replica):
                self._fail(f"no engine is left: {exc}")
        async with self._changed:
            self._changed.notify_all()

    def _is_any_left(self, but: _Replica) -> bool:
        others = [one for one in self._replicas if one is not but]
        return any(one.client is not None for one in others) or len(self._restarts) > 1

    def _fail(self, reason: str) -> None:
        self._failure = EngineError(reason)

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(notify())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)


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
