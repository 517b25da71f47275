"""Replicas: engine processes of one model, what each has in flight, and their restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from tidemill.engine_process.canary import Canary, canary_line
from tidemill.engine_process.client import EngineClient, EngineDied, EngineFailed
from tidemill.engine_process.restart_limits import MAX_DEATHS_WITHOUT_ROW, MAX_MACHINE_FAILURES
from tidemill.engine_process.totals import total_info, total_stats
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats
from tidemill.protocol.stall import STALL_SECONDS, START_SECONDS

from ..console.terminal import log

# A run sends four for each, unevenly: lines that begin alike go to one engine.
_INFLIGHT_PER_SEQUENCE: Final = 6
_CLOSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class Request:
    """A request, and the engine that has it, if one does.

    `turn` is resolved with that engine once there is one. A request with a `task` may move to
    another engine: cancelling the task takes it out of the one that has it.
    """

    number: int
    home: int
    is_urgent: bool = False
    turn: asyncio.Future[Replica | None] | None = None
    replica: Replica | None = None
    client: EngineClient | None = None
    task: asyncio.Future[Any] | None = None
    is_moved: bool = False


class Replica:
    """One engine process, and the requests that it has; `client` is None while there is none."""

    def __init__(self, number: int, command: Sequence[str], stall_seconds: float) -> None:
        self.number = number
        self.command = command
        self._stall_seconds = stall_seconds
        self.client: EngineClient | None = None
        self._made: EngineClient | None = None
        self.num_restarts = 0
        self.info: EngineInfo | None = None
        self.sent: dict[Request, None] = {}

    async def start(self) -> None:
        """Start the process; raises EngineFailed."""
        self.client = await self._make()

    async def restart(self) -> bool:
        """Start the process once more; return whether it has answered a known line then.

        Raises EngineFailed, also where it died of the line or showed a fault of the machine by it,
        or was started too often.
        """
        self.num_restarts += 1
        if self.num_restarts > MAX_DEATHS_WITHOUT_ROW:
            raise EngineFailed("it has ended too often", code=EngineDied.code)
        client = await self._make()
        line = canary_line(() if self.info is None else self.info.endpoints)
        if line is not None:
            try:
                fault = Canary(line).find_fault(await client.fetch_row(1, 0, line))
            except EngineDied as exc:
                fault = f"it ended at a known line: {exc}"
            if fault is not None:
                await client.close()
                raise EngineFailed(fault, code=EngineDied.code)
        self.client = client
        return line is not None

    async def _make(self) -> EngineClient:
        self._made = EngineClient(
            self.command, stall_seconds=self._stall_seconds, start_seconds=START_SECONDS
        )
        self.info = await self._made.start()
        return self._made

    async def close(self) -> None:
        """End the process, which may be starting."""
        if self._made is not None:
            await self._made.close()

    def give_up(self, count: int) -> None:
        """Give up the requests that came last, as far as they may move."""
        movable = [request for request in self.sent if request.task is not None]
        for request in movable[-count:] if count > 0 else ():
            assert request.task is not None
            request.is_moved = True
            request.task.cancel()

    @property
    def num_waiting(self) -> int:
        """Number of its requests that cannot all be in one step."""
        return len(self.sent) - (0 if self.info is None else self.info.max_num_seqs)

    @property
    def slack(self) -> int:
        """Number of requests more than the others that cost little: a quarter of a step."""
        return max(1, 0 if self.info is None else self.info.max_num_seqs // 4)

    @property
    def has_room(self) -> bool:
        """Say whether it may have another line: each is a suspect when it dies."""
        return len(self.sent) < _INFLIGHT_PER_SEQUENCE * (
            1 if self.info is None else max(1, self.info.max_num_seqs)
        )


class Replicas:
    """Engine processes of one model. Started inside a loop, in which all calls are made.

    One that dies is started again, unless it or all of them keep dying without a row in between. At
    each change of `ready` or `failure` the function `changed` is called.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.all = [Replica(number, each, stall_seconds) for number, each in enumerate(commands, 1)]
        self.failure: EngineError | None = None
        self.load_seconds = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._deaths_without_a_row = 0
        self._killers_without_a_row = 0
        self._past = EngineStats()  # of processes that have ended
        self._restarts: set[asyncio.Task[bool]] = set()
        self._starting: set[Replica] = set()  # again

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start all processes and end them; raises EngineError where one cannot load."""
        began = time.monotonic()
        log(f"loading {len(self.all)} engines")
        try:
            # All of them, though one may have failed: a start that is cancelled leaves a process.
            starts = [one.start() for one in self.all]
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, EngineFailed):
                    raise EngineError(str(outcome)) from outcome
                if outcome is not None:
                    raise outcome
            self.load_seconds = time.monotonic() - began
            log(f"{len(self.all)} engines loaded in {self.load_seconds:.1f} s")
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        """End all processes; one that starts is ended, not waited for."""
        self._fail("the engines are closed")
        await asyncio.gather(*(one.close() for one in self.all))
        while self._restarts:
            await asyncio.wait(self._restarts, timeout=_CLOSE_SECONDS)
            await asyncio.gather(*(one.close() for one in self.all))

    def info(self) -> EngineInfo:
        """Return the info of all together."""
        return total_info([one.info for one in self.all if one.info is not None])

    def stats(self) -> EngineStats:
        """Return the sums over all engines, past ones too; the KV cache's usage is the mean."""
        live = total_stats([client.stats for one in self.all if (client := one.client)])
        return replace(total_stats([self._past, live]), kv_cache_usage=live.kv_cache_usage)

    @property
    def ready(self) -> list[Replica]:
        """Those that have an engine which lives."""
        clients = ((one, one.client) for one in self.all)
        return [one for one, client in clients if client is not None and client.death is None]

    @property
    def is_starting(self) -> bool:
        """Say whether an engine is being started again."""
        return bool(self._starting)

    def note_row(self, replica: Replica) -> None:
        """Note that an engine has answered a request."""
        self._deaths_without_a_row = self._killers_without_a_row = replica.num_restarts = 0

    def note_killer(self) -> None:
        """Note that a request is known to have ended engines, which are well without it."""
        self._deaths_without_a_row = 0
        for replica in self.all:
            replica.num_restarts = 0
        self._killers_without_a_row += 1
        if self._killers_without_a_row >= MAX_DEATHS_WITHOUT_ROW:
            self._fail("each of the last requests has ended its engines, and none was answered")

    def restart(
        self, replica: Replica, client: EngineClient, exc: EngineDied
    ) -> asyncio.Future[bool]:
        """Start an engine again whose client has died; the future tells whether it is well then."""
        replica.client = None
        ended = replace(client.stats, running=0, waiting=0)
        self._past = total_stats([self._past, ended])
        self._deaths_without_a_row += 1
        most = MAX_MACHINE_FAILURES if exc.is_broken else MAX_DEATHS_WITHOUT_ROW
        if self._deaths_without_a_row > most:
            self._fail(f"engines keep ending, and no line has its row in between: {exc}")
        if self.failure is not None:
            given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            given_up.set_result(False)
            return given_up
        log(f"engine {replica.number} has ended ({exc}): it is started again")
        self._starting.add(replica)
        task = asyncio.create_task(self._restart(replica, client, is_broken=exc.is_broken))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        return task

    async def _restart(self, replica: Replica, client: EngineClient, *, is_broken: bool) -> bool:
        try:
            await client.close()
            if await replica.restart() and not is_broken:
                self._deaths_without_a_row = 0  # what ended it was a request, not the machine
        except Exception as exc:  # noqa: BLE001 - whatever it is, requests must not wait for it
            if self.failure is None:
                log(f"engine {replica.number} is not started again: {exc}")
            is_last = all(one.client is None for one in self.all)
            if is_last and self._starting == {replica}:
                self._fail(f"no engine is left: {exc}")
        finally:
            self._starting.discard(replica)
        self.changed()
        return replica.client is not None

    def _fail(self, reason: str) -> None:
        """Note that no engine can go on, and why."""
        if self.failure is None:
            self.failure = EngineError(reason)
        self.changed()
