"""Adapters of a server's model: listed with it, and used by single requests and by batches."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from tests.server.local.rig import CHAT, MODEL, SECONDS, ScriptedEngine
from tidemill.protocol.contract import EngineInfo
from tidemill.server.app import make_app, make_context
from tidemill.server.local.setup import make_local_batches
from tidemill.server.local.store import open_store
from tidemill.server.settings import ServerSettings


class Adapted(ScriptedEngine):
    """The scripted model with two adapters."""

    def info(self) -> EngineInfo:
        """Add the adapters to the model's description."""
        return replace(super().info(), adapters=("sql", "lab/tone"))


async def test_adapters_are_listed_with_their_parent_and_run_in_batches(tmp_path: Path) -> None:
    """One file uses the model and both adapters; an unknown name fails a file."""
    engine = Adapted()
    with open_store(tmp_path) as store:
        context = make_context(engine, (MODEL,), ServerSettings())
        local = make_local_batches(store, engine, (MODEL,), context=context)
        app = make_app(context, local.routes)
        transport = httpx.ASGITransport(app)
        async with (
            local.running(),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            found = (await client.get("/v1/models")).json()["data"]
            assert [(model["id"], model["parent"]) for model in found] == [
                (MODEL, None),
                ("sql", MODEL),
                ("lab/tone", MODEL),
            ]
            assert (await client.get("/v1/models/lab/tone")).json() == found[2]
            assert (await client.get("/v1/models/none")).status_code == 404
            ended = [
                await _ended(client, [MODEL, "sql", "lab/tone"]),
                await _ended(client, ["sql", "none"]),
            ]
            assert [batch["status"] for batch in ended] == ["completed", "failed"]
            assert ended[0]["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
            assert ended[0]["model"] == MODEL
            assert ended[1]["errors"]["data"][0]["code"] == "model_not_found"


async def _ended(client: httpx.AsyncClient, models: list[str]) -> dict[str, Any]:
    """Run a file with one line per name, and return its batch."""
    lines = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": name, "say": name}}
        for name in models
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    uploaded = await client.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}
    )
    options = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT}
    options["completion_window"] = "24h"
    batch = (await client.post("/v1/batches", json=options)).json()
    async with asyncio.timeout(SECONDS):
        while batch["status"] not in {"completed", "failed"}:
            await asyncio.sleep(0)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return dict(batch)
