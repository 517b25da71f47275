"""Replicas: engine processes of one model, their requests in flight, and their restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats
from tidemill.protocol.stall import START_SECONDS

from .canary import Canary, canary_line
from .client import EngineClient, EngineDied, EngineFailed
from .deaths import MAX_DEATHS_WITHOUT_ROW, MAX_MACHINE_FAILURES, Streak

# A run sends four per sequence, but unevenly: lines with the same prefix go to one engine.
_INFLIGHT_PER_SEQUENCE: Final = 6
_CLOSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class Request:
    """A request, and the engine that has it, if any.

    `turn` is resolved with the engine. A request with a `task` may move to another engine:
    cancelling the task removes it from its current engine.
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
    """One engine process and its requests; `client` is None while there is no process."""

    def __init__(self, number: int, command: Sequence[str], stall_seconds: float) -> None:
        self.number = number
        self.command = command
        self._stall_seconds = stall_seconds
        self.client: EngineClient | None = None
        self._made: EngineClient | None = None
        self.restarts = Streak()
        self.info: EngineInfo | None = None
        self.sent: dict[Request, None] = {}

    async def start(self) -> None:
        """Start the process; raises EngineFailed."""
        self.client = await self._make()

    async def restart(self) -> bool:
        """Restart the process; return whether it then answered the canary line.

        Raises EngineFailed, also if it died of that line, answered it incorrectly, or was restarted
        too often.
        """
        if self.restarts.extend(MAX_DEATHS_WITHOUT_ROW):
            raise EngineFailed("it exited too often", code=EngineDied.code)
        client = await self._make()
        line = canary_line(() if self.info is None else self.info.endpoints)
        if line is not None:
            try:
                fault = Canary(line).find_fault(await client.fetch_row(1, 0, line))
            except EngineDied as exc:
                fault = f"it exited while running the canary line: {exc}"
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
        """Stop the process, which may be starting."""
        if self._made is not None:
            await self._made.close()

    def give_up(self, count: int) -> None:
        """Give up the last `count` requests that may move."""
        movable = [request for request in self.sent if request.task is not None]
        for request in movable[-count:] if count > 0 else ():
            assert request.task is not None
            request.is_moved = True
            request.task.cancel()

    @property
    def num_waiting(self) -> int:
        """Return the number of its requests that do not fit in one step."""
        return len(self.sent) - (0 if self.info is None else self.info.max_num_seqs)

    @property
    def slack(self) -> int:
        """Return how many requests more than others it may have: a quarter of a step."""
        return max(1, 0 if self.info is None else self.info.max_num_seqs // 4)

    @property
    def has_room(self) -> bool:
        """Return whether it may have another line, each of which is a suspect if it dies."""
        return len(self.sent) < _INFLIGHT_PER_SEQUENCE * (
            1 if self.info is None else max(1, self.info.max_num_seqs)
        )


class Replicas:
    """Engine processes of one model, started in an event loop in which all calls are made.

    A process that dies is restarted, unless processes keep dying without a row in between. The
    function `changed` is called on each change of `ready` or `failure`.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        changed: Callable[[], None],
        *,
        stall_seconds: float,
        log: Callable[[str], None],
    ) -> None:
        self.all = [Replica(number, each, stall_seconds) for number, each in enumerate(commands, 1)]
        self.failure: EngineError | None = None
        self.load_seconds = 0.0
        self._changed = changed
        self._log = log
        self._deaths = Streak()
        self._killers = Streak()
        self._past = EngineStats()  # of processes that have exited
        self._restarts: set[asyncio.Task[bool]] = set()
        self._starting: set[Replica] = set()  # restarting

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start all processes, and stop them at the end; raises EngineError if one cannot load."""
        began = time.monotonic()
        self._log(f"loading {len(self.all)} engines")
        try:
            # Await all, even if one has failed: a cancelled start would leave a process behind.
            starts = [one.start() for one in self.all]
            for outcome in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(outcome, EngineFailed):
                    raise EngineError(str(outcome)) from outcome
                if outcome is not None:
                    raise outcome
            self.load_seconds = time.monotonic() - began
            self._log(f"{len(self.all)} engines loaded in {self.load_seconds:.1f} s")
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        """Stop all processes, without waiting for those that are starting."""
        self._fail("the engines are closed")
        await asyncio.gather(*(one.close() for one in self.all))
        while self._restarts:
            await asyncio.wait(self._restarts, timeout=_CLOSE_SECONDS)
            await asyncio.gather(*(one.close() for one in self.all))

    def info(self) -> EngineInfo:
        """Return the combined info of all engines."""
        return total_info([one.info for one in self.all if one.info is not None])

    def stats(self) -> EngineStats:
        """Return the sums over all engines and past ones; the KV cache's usage is the mean."""
        live = total_stats([client.stats for one in self.all if (client := one.client)])
        return replace(total_stats([self._past, live]), kv_cache_usage=live.kv_cache_usage)

    @property
    def ready(self) -> list[Replica]:
        """Return the replicas whose engine is alive."""
        return [
            one for one in self.all if (client := one.client) is not None and client.death is None
        ]

    @property
    def is_starting(self) -> bool:
        """Return whether an engine is being restarted."""
        return bool(self._starting)

    def note_row(self, replica: Replica) -> None:
        """Record that an engine has answered a request."""
        self._deaths.end()
        self._killers.end()
        replica.restarts.end()

    def note_killer(self) -> None:
        """Record that a request has killed engines that are healthy without it."""
        for streak in (self._deaths, *(replica.restarts for replica in self.all)):
            streak.end()
        if self._killers.extend(MAX_DEATHS_WITHOUT_ROW):
            self._fail("each of the last requests killed its engines, and none was answered")

    def restart(
        self, replica: Replica, client: EngineClient, exc: EngineDied
    ) -> asyncio.Future[bool]:
        """Restart an engine whose client has died; the future's result is its health afterwards."""
        replica.client = None
        ended = replace(client.stats, running=0, waiting=0)
        self._past = total_stats([self._past, ended])
        limit = MAX_MACHINE_FAILURES if exc.is_broken else MAX_DEATHS_WITHOUT_ROW
        if self._deaths.extend(limit):
            self._fail(f"engines keep exiting without finishing a line in between: {exc}")
        if self.failure is not None:
            given_up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            given_up.set_result(False)
            return given_up
        self._log(f"engine {replica.number} exited ({exc}): restarting it")
        self._starting.add(replica)
        task = asyncio.create_task(self._restart(replica, client, is_broken=exc.is_broken))
        self._restarts.add(task)
        task.add_done_callback(self._note_restart)
        return task

    async def _restart(self, replica: Replica, client: EngineClient, *, is_broken: bool) -> bool:
        try:
            await client.close()
            if await replica.restart() and not is_broken:
                self._deaths.end()  # a request killed it, not the machine
        except Exception as exc:  # noqa: BLE001 - requests must not wait for it
            if self.failure is None:
                self._log(f"engine {replica.number} cannot be restarted: {exc}")
            is_last = all(one.client is None for one in self.all)
            if is_last and self._starting == {replica}:
                self._fail(f"no engine is left: {exc}")
        finally:
            self._starting.discard(replica)
        self._changed()
        return replica.client is not None

    def _note_restart(self, task: asyncio.Task[bool]) -> None:
        """Forget a restart; one that ended without assigning requests leaves them waiting."""
        self._restarts.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(f"requests cannot be assigned to engines: {exc!r}")

    def _fail(self, reason: str) -> None:
        """Record that no engine can continue, and the reason."""
        if self.failure is None:
            self.failure = EngineError(reason)
        self._changed()


def total_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Return the combined info: GPUs and sequences in a step are sums."""
    return replace(
        infos[0],
        num_gpus=sum(info.num_gpus for info in infos),
        max_num_seqs=sum(info.max_num_seqs for info in infos),
    )


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of all statistics; the KV cache's usage is the mean."""
    if not stats:
        return EngineStats()
    total = EngineStats(*map(sum, zip(*map(astuple, stats), strict=True)))
    return replace(total, kv_cache_usage=total.kv_cache_usage / len(stats))
