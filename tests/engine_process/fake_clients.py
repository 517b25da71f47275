"""Engine processes in the process of a test, by hand-made turns instead of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from tidemill.engine_process import replicas
from tidemill.engine_process.client import EngineDied, EngineFailed
from tidemill.engine_process.exchange import decode_request, encode_reply
from tidemill.engine_process.frames import Answer, AnswerKind, Row
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, Usage

CANARY_ENDPOINT = "/v1/completions"
_KNOWN = "known"
_KNOWN_ROW = to_json({"response": {"status_code": 200, "body": {"choices": [{"text": "in"}]}}})


@dataclass(slots=True)
class Life:
    """One life of an engine: the lines that it has and had at its end, and those that began to run.

    `company` are the lines that ran when each of `began` did, itself included.
    """

    engine: int
    has: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    began: list[str] = field(default_factory=list)
    company: list[frozenset[str]] = field(default_factory=list)
    lost: frozenset[str] = frozenset()
    death: str | None = None


@dataclass
class Machine:
    """Machine whose engines take `slots` lines at a time and end at `killers`.

    Lines take up to `turns` turns of the event loop. Engines that are `ill` end at the known line
    of their next start, those that are `broken` report that when they end, and those that are
    `lost` cannot be started again.
    """

    slots: int = 8
    turns: int = 3
    killers: frozenset[str] = frozenset()
    random: Random = field(default_factory=lambda: Random(0))
    endpoints: tuple[str, ...] = (CANARY_ENDPOINT,)
    ill: set[int] = field(default_factory=set)
    broken: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    lives: list[Life] = field(default_factory=list)
    clients: dict[int, FakeClient] = field(default_factory=dict)
    on_start: Callable[[Life, str], None] = lambda _life, _name: None

    @property
    def num_deaths(self) -> int:
        """Number of lives that have ended."""
        return sum(life.death is not None for life in self.lives)

    def kill(self, engine: int, reason: str = "SIGKILL") -> None:
        """End the life of an engine."""
        self.clients[engine].die(reason)


class FakeClient:
    """One life of an engine of a machine; `EngineClient`, as far as replicas use it."""

    def __init__(self, machine: Machine, command: Sequence[str]) -> None:
        self._machine = machine
        self._engine = int(command[0])
        self._slots = asyncio.Semaphore(machine.slots)
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stats = EngineStats()
        self.life = Life(self._engine)

    async def start(self) -> EngineInfo:
        """Start a life."""
        await asyncio.sleep(0)
        machine = self._machine
        if self._engine in machine.lost:
            raise EngineFailed("no device", code="engine_error")
        machine.lives.append(self.life)
        machine.clients[self._engine] = self
        slots, endpoints = machine.slots, machine.endpoints
        return EngineInfo("fake", "r1", "test", "cpu", 0, slots, endpoints=endpoints)

    async def close(self) -> None:
        """Hold nothing."""

    @property
    def death(self) -> str | None:
        """Return why the life has ended."""
        return self.life.death

    def die(self, reason: str) -> None:
        """End the life."""
        if not self._died.done():
            self.life.death = reason
            self.life.lost = frozenset(self.life.has)
            self._died.set_result(reason)

    def fetch_row(self, number: int, created: int, data: bytes) -> asyncio.Future[Row]:
        """Answer a line, or end at it."""
        del number, created
        return self._begin(from_json(data)["custom_id"])

    async def ask(
        self, request: bytes, created: int, *, is_online: bool
    ) -> AsyncGenerator[Answer, None]:
        """Answer a request, or end at it."""
        del created, is_online
        name = decode_request(request).body["custom_id"]
        await self._begin(name)
        yield Answer(0, AnswerKind.REPLY, encode_reply(Reply(200, {"custom_id": name})))

    def _begin(self, name: str) -> asyncio.Future[Row]:
        """Return a future of a line's row; the life has the line from now on."""
        if self.life.death is not None:
            raise EngineDied(self.life.death, was_sent=False)
        self.life.has.add(name)
        row = asyncio.ensure_future(self._run(name))
        row.add_done_callback(lambda _: self.life.has.discard(name))
        return row

    async def _run(self, name: str) -> Row:
        running = asyncio.ensure_future(self._answer(name))
        try:
            await asyncio.wait((running, self._died), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                is_broken = self._engine in self._machine.broken
                raise EngineDied(self._died.result(), is_broken=is_broken)
            running.result()
        finally:
            running.cancel()
        row: dict[str, Any] = {"custom_id": name, "response": {"status_code": 200, "body": {}}}
        printed = _KNOWN_ROW if name == _KNOWN else to_json(row) + b"\n"
        return Row(0, True, Usage(), printed)  # noqa: FBT003 - as on the wire

    async def _answer(self, name: str) -> None:
        if name == _KNOWN:
            if self._engine in self._machine.ill:
                self.die(name)
                await asyncio.Future()
            return
        async with self._slots:
            self.life.running.add(name)
            self.life.began.append(name)
            self.life.company.append(frozenset(self.life.running))
            try:
                self._machine.on_start(self.life, name)
                for _ in range(self._machine.random.randint(1, self._machine.turns)):
                    await asyncio.sleep(0)
                if name in self._machine.killers:
                    self.die(name)
                if self.life.death is not None:
                    await asyncio.Future()
            finally:
                self.life.running.discard(name)
                self.life.has.discard(name)


def install(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Let replicas start their engines on a machine."""

    def make(command: Sequence[str], **_: object) -> FakeClient:
        return FakeClient(machine, command)

    monkeypatch.setattr(replicas, "EngineClient", make)
