"""A server at a real port in the test's own loop, over an engine that a test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.routing import Route

from tidemill.engine.errors import EngineClosed
from tidemill.protocol.contract import EngineInfo, EngineStats, Reply, StreamedReply
from tidemill.server.app import make_app, make_context
from tidemill.server.context import ServerContext
from tidemill.server.settings import ServerSettings
from tidemill.server.uvicorn_server import Server, make_server

MODEL = "scripted"
SECONDS = 120  # far more than anything here takes: reached only when something hangs


class HeldEngine:
    """Answers with what it was asked; where a body says `wait`, once `go` is set.

    Where it says `late`, nothing is known of the answer before that. A stream tells two chunks,
    waits for `go` between them, and notes when it is left.
    """

    def __init__(self, max_num_seqs: int = 2) -> None:
        self.max_num_seqs = max_num_seqs
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.is_asked = asyncio.Event()
        self.go = asyncio.Event()
        self.is_left = asyncio.Event()
        self.is_engine_lost = False

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer a line."""
        reply = await self.answer(url, body, request_id, created)
        assert isinstance(reply, Reply)
        return reply

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Follow the script in the body."""
        del created
        assert request_id.startswith("req_")
        self.asked.append((url, body))
        self.is_asked.set()
        try:
            if body.get("late"):
                await self.go.wait()
        except asyncio.CancelledError:
            self.is_left.set()
            raise
        if self.is_engine_lost:
            raise EngineClosed("gone")
        if body.get("bug"):
            raise ZeroDivisionError
        if body.get("stream") and "reply" not in body:
            return StreamedReply(self._chunks(body))
        try:
            if body.get("wait"):
                await self.go.wait()
        except asyncio.CancelledError:
            self.is_left.set()
            raise
        if "reply" in body:
            return Reply(body.get("status", 200), body["reply"])
        shown = {k: v.decode() if isinstance(v, bytes) else v for k, v in body.items()}
        return Reply(200, {"url": url, "body": shown})

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"say": "é"}
            if body.get("wait"):
                await self.go.wait()
            yield {"say": "x" * body.get("size", 1)}
        finally:
            self.is_left.set()

    def info(self) -> EngineInfo:
        """A model without weights."""
        return EngineInfo("/a/path", None, "1.2.3", "cpu", 0, self.max_num_seqs, adapters=("fine",))

    def stats(self) -> EngineStats:
        """A number of each kind."""
        if self.is_engine_lost:
            raise EngineClosed("gone")
        return EngineStats(3, 2, 0.5, 100, 40, 30, 1)

    def close(self) -> None:
        """Nothing to stop."""


@dataclass
class Site:
    """A server that is up, a client of it, and what would be a signal."""

    engine: HeldEngine
    context: ServerContext
    client: httpx.AsyncClient
    signal: Callable[[], object]
    server: Server
    url: str
    serving: asyncio.Task[None]
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection of one's own."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, *parts: bytes) -> bytes:
        """Return all that comes back to some bytes until the connection ends."""
        reader, writer = await self.connect()
        for part in parts:
            writer.write(part)
            await writer.drain()
        try:
            async with asyncio.timeout(SECONDS):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def site(
    *, engine: HeldEngine | None = None, others: Sequence[Route] = (), **settings: Any
) -> AsyncIterator[Site]:
    """Serve at a free port with these settings and other routes, until left."""
    held = engine or HeldEngine()
    context = make_context(held, (MODEL, "*"), ServerSettings(port=0, **settings))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    listeners: list[Callable[[], object]] = []

    @contextmanager
    def on_signal(listener: Callable[[], object]) -> Iterator[None]:
        listeners.append(listener)
        yield

    server = make_server(
        make_app(context, others),
        context.admission,
        context.settings,
        on_signal=on_signal,
        on_listening=address.set_result,
    )
    serving = asyncio.create_task(server.serve())
    url = await asyncio.wait_for(address, SECONDS)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        try:
            port = 0 if context.settings.uds else int(url.rpartition(":")[2])
            yield Site(held, context, client, listeners[0], server, url, serving, port)
        finally:
            held.go.set()
            server.should_exit = True
            await client.aclose()
            await asyncio.wait_for(serving, SECONDS)
