"""An engine in the process of a test, and an AWS that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Any

from tests.engine_process.scripted_engine import ScriptedEngine
from tidemill.batch.errors import HandlerError
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.run_line import run_line
from tidemill.engine_process.client import EngineDied, EngineFailed
from tidemill.engine_process.frames import Row
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.calls import Call, Operation
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, Usage


class FakeEngine:
    """An engine in this process, one link a life.

    `requests` are the names of all requests that it received, `inside` those in flight, and
    `company` those in flight when each came. The lives that are `stillborn`, counted from 1, die
    while they start; after `refuses_after` lives it cannot be started any more. `stats` is what it
    reports of itself. It serves `endpoints`, and `is_broken` ends a life by any line at all; to the
    known line it replies with `known_status`.
    """

    def __init__(
        self,
        *,
        refuses_after: int = 100,
        stillborn: Container[int] = (),
        max_num_seqs: int = 16,
        load_seconds: float = 0,
        endpoints: tuple[str, ...] = (),
        is_broken: bool = False,
        known_status: int = 200,
    ) -> None:
        self.refuses_after = refuses_after
        self.stillborn = stillborn
        self.max_num_seqs = max_num_seqs
        self.load_seconds = load_seconds
        self.endpoints = endpoints
        self.is_broken = is_broken
        self.known_status = known_status
        self.says_broken = False
        self.stats = EngineStats(kv_cache_usage=0.25)
        self.requests: list[str] = []
        self.inside: set[str] = set()
        self.company: list[frozenset[str]] = []
        self.num_lives = 0
        self._link: FakeLink | None = None

    def new_life(self) -> FakeLink:
        """Return the link to the next life."""
        self.num_lives += 1
        self._link = FakeLink(self)
        return self._link

    def kill(self) -> None:
        """End the life that it has."""
        assert self._link is not None
        self._link.die()


class FakeLink:
    """One life of a FakeEngine, which `die` in a body ends as it would end a process."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._script = ScriptedEngine()
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def stats(self) -> EngineStats:
        """Return what the engine says of itself."""
        return self._engine.stats

    async def start(self) -> EngineInfo:
        """Start, unless it refuses."""
        await asyncio.sleep(self._engine.load_seconds)
        if self._engine.num_lives > self._engine.refuses_after:
            raise EngineFailed("no device", code="engine_error")
        if self._engine.num_lives in self._engine.stillborn:
            raise EngineFailed("killed by SIGKILL", code=EngineDied.code)
        return EngineInfo(
            "scripted",
            "r1",
            "test",
            "cpu",
            1,
            self._engine.max_num_seqs,
            endpoints=self._engine.endpoints,
            labels_spans=True,
        )

    async def close(self) -> None:
        """Nothing is held."""

    def die(self) -> None:
        """End, as a process does."""
        if not self._died.done():
            self._died.set_result(None)

    async def fetch_row(self, number: int, created: int, data: bytes) -> Row:
        """Answer a line, or die of it."""
        answering = asyncio.ensure_future(run_line(RawLine(number, data), self, created=created))
        try:
            await asyncio.wait([answering, self._died], return_when=asyncio.FIRST_COMPLETED)
            if self._died.done():
                raise EngineDied("killed", is_broken=self._engine.says_broken)
            done = answering.result()
        finally:
            answering.cancel()
        return Row(0, done.is_success, done.usage or Usage(), done.row)

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the body's instructions, and record the request."""
        name = body.get("custom_id", "known")
        self._engine.requests.append(name)
        self._engine.inside.add(name)
        self._engine.company.append(frozenset(self._engine.inside))
        try:
            if name == "known":
                body = {**body, "status": self._engine.known_status}
            if "die" not in body and not self._engine.is_broken:
                return await self._script.respond(url, body, request_id, created)
            await asyncio.sleep(body.get("wait", 0))
            self.die()
            return await asyncio.Future()
        finally:
            self._engine.inside.discard(name)


class QuickAws(AioAws):
    """Looks at an empty queue for a moment only, so that a worker that stops does so at once."""

    async def _send(self, call: Call) -> Any:
        if call.method != "receive_message":
            return await super()._send(call)
        arguments = {**call.arguments, "WaitTimeSeconds": 0}
        response = await super()._send(Call(call.service, call.method, arguments))
        if not response.get("Messages"):
            await asyncio.sleep(0.05)
        return response


def is_claim(call: Call) -> bool:
    """Say whether a call claims a shard."""
    return any("Put" in write for write in call.arguments.get("TransactItems", ()))


def is_commit(call: Call) -> bool:
    """Say whether a call commits a shard."""
    return any("Delete" in write for write in call.arguments.get("TransactItems", ()))


class FaultyAws:
    """Drives operations, but what `refuses` says of a call, None or an exception, comes first.

    With `after` the exception takes the place of an answer: the call has been made.
    """

    def __init__(
        self, aws: AioAws, refuses: Callable[[Call], Exception | None], *, after: bool = False
    ) -> None:
        self._aws = aws
        self._refuses = refuses
        self._after = after

    async def run(self, operation: Operation[Any]) -> Any:
        """Return the operation's result."""
        return await self._aws.run(self._spoiled(operation))

    def _spoiled(self, operation: Operation[Any]) -> Operation[Any]:
        try:
            call = next(operation)
            while True:
                failure = self._refuses(call)
                if failure is not None and not self._after:
                    call = operation.throw(failure)
                    continue
                try:
                    response = yield call
                except HandlerError as exc:
                    call = operation.throw(exc)
                else:
                    call = operation.throw(failure) if failure else operation.send(response)
        except StopIteration as stop:
            return stop.value
