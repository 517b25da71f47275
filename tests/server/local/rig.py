"""A local server in the test's own loop: a data folder, a scripted engine and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette

from tidemill.protocol.contract import (
    EngineError,
    EngineInfo,
    EngineStats,
    Reply,
    StreamedReply,
    Usage,
)
from tidemill.server.app import make_app, make_context
from tidemill.server.local.batch_routes import BatchRoutes
from tidemill.server.local.dashboard_routes import DashboardRoutes
from tidemill.server.local.file_routes import FileRoutes
from tidemill.server.local.message_batch_routes import MessageBatchRoutes
from tidemill.server.local.response_routes import ResponseRoutes
from tidemill.server.local.runner import Runner
from tidemill.server.local.store import Store, open_store
from tidemill.server.local.upload_routes import UploadRoutes
from tidemill.server.settings import ServerSettings

MODEL = "scripted"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
SECONDS = 120
CHAT = "/v1/chat/completions"


class ScriptedEngine:
    """Answers with a body's `reply`, if any; its `wait` waits for `go`, or for one permit."""

    def __init__(self, max_num_seqs: int = 4) -> None:
        self.max_num_seqs = max_num_seqs
        self.requests: list[str] = []
        self.go = asyncio.Event()
        self.permits = asyncio.Semaphore(0)
        self.running = 0
        self.most_running = 0

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script in the body."""
        del url, request_id
        self.requests.append(body["say"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if body.get("wait") == "permit":
                await self.permits.acquire()
            elif body.get("wait"):
                await self.go.wait()
        finally:
            self.running -= 1
        if "die" in body:
            raise EngineError("no engine")
        if (status := body.get("status", 200)) != 200:
            error = {"message": "No.", "type": "t", "param": None, "code": "c"}
            return Reply(status, {"error": error}, Usage(1, 0, 0))
        reply = body.get("reply", {"say": body["say"], "created": created})
        return Reply(200, reply, Usage(10, 4, 3, 0.0, 2))

    async def answer(
        self, url: str, body: dict[str, Any], request_id: str, created: int
    ) -> Reply | StreamedReply:
        """Answer with one whole reply."""
        return await self.respond(url, body, request_id, created)

    def info(self) -> EngineInfo:
        """Describe a model without weights."""
        return EngineInfo(
            MODEL, None, "test", "cpu", 0, max_num_seqs=self.max_num_seqs, labels_spans=True
        )

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats()

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Local:
    """A running server: its store, its engine and a client."""

    store: Store
    runner: Runner
    engine: ScriptedEngine
    client: httpx.AsyncClient
    app: Starlette
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def upload(self, data: bytes, **fields: str) -> httpx.Response:
        """Upload a batch input file."""
        return await self.client.post(
            "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch", **fields}
        )

    async def submit(self, data: bytes, **options: Any) -> dict[str, Any]:
        """Upload a file and create a batch from it."""
        uploaded = await self.upload(data)
        assert uploaded.status_code == 200, uploaded.text
        created = await self.client.post(
            "/v1/batches",
            json={"input_file_id": uploaded.json()["id"], "endpoint": CHAT, **options},
        )
        assert created.status_code == 200, created.text
        return dict(created.json())

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """Return the current batch object."""
        found = await self.client.get(f"/v1/batches/{batch_id}")
        assert found.status_code == 200, found.text
        self.seen.append(found.json())
        return dict(found.json())

    async def until(self, batch_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return a batch as soon as a condition holds."""
        async with asyncio.timeout(SECONDS):
            batch = await self.batch(batch_id)
            while not holds(batch):
                await asyncio.sleep(0.005)
                batch = await self.batch(batch_id)
        return batch

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """Return a batch once it has ended."""
        return await self.until(
            batch_id,
            lambda batch: batch["status"] in {"completed", "failed", "expired", "cancelled"},
        )

    async def rows(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the rows of a result file; none if there is no file."""
        if file_id is None:
            return []
        found = await self.client.get(f"/v1/files/{file_id}/content")
        assert found.status_code == 200, found.text
        return [json.loads(line) for line in found.content.splitlines()]


@asynccontextmanager
async def serving(
    root: Path,
    engine: ScriptedEngine | None = None,
    *,
    api_keys: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[Local]:
    """Serve a folder; its unfinished batches continue."""
    engine = engine or ScriptedEngine()
    max_file_bytes = settings.pop("max_file_bytes", 2**30)
    with open_store(root) as store:
        runner = Runner(store, engine, {MODEL: MODEL}, retry_seconds=0.01, **settings)
        context = make_context(engine, (MODEL,), ServerSettings(api_keys=api_keys))
        responses = ResponseRoutes(context, store.responses)
        files, batches = FileRoutes(store, max_file_bytes), BatchRoutes(store, runner)
        routes = [
            *responses.routes(),
            *files.routes(),
            *UploadRoutes(store, max_file_bytes).routes(),
            *batches.routes(),
            *MessageBatchRoutes(store, runner, batches, context).routes(),
            *DashboardRoutes(store, batches, files, [MODEL], has_keys=bool(api_keys)).routes(),
        ]
        app = make_app(context, routes)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            runner.running(),
            responses.running(),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            yield Local(store, runner, engine, client, app)


def lines_of(bodies: Sequence[dict[str, Any]]) -> bytes:
    """Return a file of requests; request i has the custom ID `ci` and says `si`."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": CHAT,
                "body": {"model": MODEL, "say": f"s{number}", **body},
            }
        ).encode()
        + b"\n"
        for number, body in enumerate(bodies)
    )
