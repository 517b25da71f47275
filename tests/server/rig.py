"""A server at a real port in the test's own loop, over an engine that the test controls."""

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
    """Answers with the request; where a body has `wait`, once `go` is set.

    With `late`, the answer's kind is unknown before that. A stream sends two chunks, waits for `go`
    between them, and records when it is closed.
    """

    def __init__(self, max_num_seqs: int = 2) -> None:
        self.max_num_seqs = max_num_seqs
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.has_request = asyncio.Event()
        self.go = asyncio.Event()
        self.is_left = asyncio.Event()
        self.is_engine_lost = False

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer a batch line."""
        reply = await self.answer(url, body, request_id, created)
        assert isinstance(reply, Reply)
        return reply

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Follow the script in the body."""
        del created
        assert request_id.startswith("req_")
        self.requests.append((url, body))
        self.has_request.set()
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
        """Describe a model without weights."""
        return EngineInfo("/a/path", None, "1.2.3", "cpu", 0, self.max_num_seqs, adapters=("fine",))

    def stats(self) -> EngineStats:
        """Return a different number for each field."""
        if self.is_engine_lost:
            raise EngineClosed("gone")
        return EngineStats(3, 2, 0.5, 100, 40, 30, 1)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Site:
    """A running server, a client of it, and a stand-in for its signals."""

    engine: HeldEngine
    context: ServerContext
    client: httpx.AsyncClient
    signal: Callable[[], object]
    server: Server
    url: str
    serving: asyncio.Task[None]
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, *parts: bytes) -> bytes:
        """Send some bytes and return everything that comes back until the connection ends."""
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
    """Serve at a free port with these settings and extra routes while entered."""
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
