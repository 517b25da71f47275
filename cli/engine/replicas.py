"""Replicas: engine processes of one model, what each has in flight, and their restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from tidemill.handler.worker.canary import Canary, canary_line
from tidemill.handler.worker.engine_client import EngineClient, EngineDied, EngineFailed
from tidemill.protocol.contract import EngineError, EngineInfo, EngineStats
from tidemill.protocol.totals import total_info, total_stats

from ..console.terminal import log

_STALL_SECONDS: Final = 600.0
_START_SECONDS: Final = 3600.0
_MAX_DEATHS_WITHOUT_A_ROW: Final = 5
_MAX_RESTARTS: Final = 10
_HOME_LOAD: Final = 1.25
_CLOSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class Sent:
    """A request in an engine; `task` waits for its row, and may be given up to move elsewhere."""

    task: asyncio.Future[Any]
    is_moved: bool = False


class Replica:
    """One engine process, and the requests that it has; `client` is None while there is none."""

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.command = command
        self.client: EngineClient | None = None
        self._made: EngineClient | None = None
        self.num_restarts = 0
        self.info: EngineInfo | None = None
        self.sent: dict[Sent, None] = {}

    async def start(self) -> None:
        """Start the process; raises EngineFailed."""
        self.client = await self._make()

    async def restart(self) -> bool:
        """Start the process once more; return whether it has answered a known line then.

        Raises EngineFailed, also where it died of the line or showed a fault of the machine by it,
        or was started too often.
        """
        self.num_restarts += 1
        if self.num_restarts > _MAX_RESTARTS:
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
            self.command, stall_seconds=_STALL_SECONDS, start_seconds=_START_SECONDS
        )
        self.info = await self._made.start()
        return self._made

    async def close(self) -> None:
        """End the process, which may be starting."""
        if self._made is not None:
            await self._made.close()

    @contextmanager
    def holding(self, sent: Sent) -> Iterator[None]:
        """Count a request as this engine's while entered."""
        self.sent[sent] = None
        try:
            yield
        finally:
            del self.sent[sent]

    def give_up(self, count: int) -> None:
        """Give up the requests that came last."""
        for sent in [*self.sent][-count:]:
            sent.is_moved = True
            sent.task.cancel()

    @property
    def num_waiting(self) -> int:
        """Number of its requests that cannot all be in one step."""
        return len(self.sent) - (0 if self.info is None else self.info.max_num_seqs)

    @property
    def slack(self) -> int:
        """Number of requests more than the others that cost little: a quarter of a step."""
        return max(1, 0 if self.info is None else self.info.max_num_seqs // 4)


class Replicas:
    """Engine processes of one model. Started inside a loop, in which all calls are made.

    One that dies is started again, unless engines keep ending and none has a row in between, or
    answers a known line once it is started again.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self.all = [Replica(number, each) for number, each in enumerate(commands, 1)]
        self.failure: EngineError | None = None
        self.load_seconds = 0.0
        self._deaths_without_a_row = 0
        self._past = EngineStats()  # of processes that have ended
        self._restarts: set[asyncio.Task[None]] = set()
        self._starting: set[Replica] = set()  # again

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Start all processes and end them; raises EngineError where one cannot load."""
        self._changed = asyncio.Condition()
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
        if self.failure is None:
            self.failure = EngineError("the engines are closed")
        await self._notify()
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
        """Those that have an engine."""
        return [one for one in self.all if one.client is not None]

    async def choose(self, home: int) -> Replica:
        """Return the engine of requests that begin alike, or the one with least to do.

        `home` is a number for the request, the same for those that begin alike. Waits while no
        engine lives; raises EngineError where none can go on.
        """
        async with self._changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                ready = self.ready
                if ready:
                    break
                await self._changed.wait()
        wanted = ready[home % len(ready)]
        mean = sum(len(one.sent) for one in ready) / len(ready)
        if len(wanted.sent) <= _HOME_LOAD * mean + wanted.slack:
            return wanted
        return min(ready, key=lambda one: len(one.sent))

    def note_row(self) -> None:
        """Note that an engine has answered: engines that end do not all end at once."""
        self._deaths_without_a_row = 0

    def restart(self, replica: Replica, client: EngineClient | None, exc: EngineDied) -> None:
        """Start an engine again whose client has died, once."""
        if client is None or replica.client is not client:
            return
        replica.client = None
        ended = replace(client.stats, running=0, waiting=0)
        self._past = total_stats([self._past, ended])
        if self.failure is not None:
            return
        self._deaths_without_a_row += 1
        if self._deaths_without_a_row > _MAX_DEATHS_WITHOUT_A_ROW:
            self._fail(f"engines keep ending, and no line has its row in between: {exc}")
            return
        log(f"engine {replica.number} has ended ({exc}): it is started again")
        self._starting.add(replica)
        self._run(self._restart(replica, client, is_broken=exc.is_broken))

    async def _restart(self, replica: Replica, client: EngineClient, *, is_broken: bool) -> None:
        try:
            await client.close()
            if await replica.restart() and not is_broken:
                self.note_row()  # what ended it was a request, not the machine
        except Exception as exc:  # noqa: BLE001 - whatever it is, requests must not wait for it
            if self.failure is None:
                log(f"engine {replica.number} is not started again: {exc}")
            if not self.ready and self._starting == {replica}:
                self._fail(f"no engine is left: {exc}")
        finally:
            self._starting.discard(replica)
        await self._notify()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = EngineError(reason)
        self._run(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _run(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(doing)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
