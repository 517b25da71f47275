"""Stored and background responses: restarts, limits, disk errors and deletion."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.local.rig import MODEL, ScriptedEngine
from tidemill.protocol.contract import Reply
from tidemill.protocol.responses.response import response_id
from tidemill.server.app import make_app, make_context
from tidemill.server.context import ServerContext
from tidemill.server.local import response_routes
from tidemill.server.local.response_routes import ResponseRoutes
from tidemill.server.local.responses import (
    MAX_LINKED,
    STORED_SECONDS,
    ResponseTable,
    StoredResponse,
    input_items,
)
from tidemill.server.local.store import Store, open_store
from tidemill.server.settings import ServerSettings

URL = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hi", "say": "s"}
SECONDS = 20


class Engine(ScriptedEngine):
    """Answers with an empty response, or as a body requests."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Any] = []

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script in the body."""
        self.inputs.append(body["input"])
        if body.get("status") == "broken":
            raise ValueError("broken")
        reply = await super().respond(url, body, request_id, created)
        if reply.status_code != 200:
            return reply
        name = response_id(request_id)
        response = {"id": name, "created_at": created, "status": "completed", "output": []}
        return reply._replace(body=response)


@dataclass
class Site:
    """A server with stored responses over a scripted engine."""

    def __init__(
        self,
        store: Store,
        engine: ScriptedEngine,
        context: ServerContext,
        client: httpx.AsyncClient,
    ) -> None:
        self.store = store
        self.engine = engine
        self.context = context
        self.client = client

    async def post(self, **fields: Any) -> httpx.Response:
        """Send a request for a response."""
        return await self.client.post(URL, json={**BODY, **fields})

    async def start(self, **fields: Any) -> str:
        """Start a background response, and return its ID."""
        created = await self.post(background=True, **fields)
        assert created.status_code == 200, created.text
        assert created.json()["status"] == "queued"
        return str(created.json()["id"])

    async def get(self, name: str) -> dict[str, Any]:
        """Return a stored response."""
        found = await self.client.get(f"{URL}/{name}")
        assert found.status_code == 200, found.text
        return dict(found.json())

    async def until(self, name: str, *statuses: str) -> dict[str, Any]:
        """Return a response once it has one of these statuses."""
        response = await self.get(name)
        async with asyncio.timeout(SECONDS):
            while response["status"] not in statuses:
                await asyncio.sleep(0.002)
                response = await self.get(name)
        return response


async def until(holds: Callable[[], bool]) -> None:
    """Return as soon as a condition holds."""
    async with asyncio.timeout(SECONDS):
        is_true = holds()
        while not is_true:
            await asyncio.sleep(0.002)
            is_true = holds()


@asynccontextmanager
async def serving(
    root: Path, engine: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[Site]:
    """Serve a folder; its open responses run again."""
    engine = engine or Engine()
    with open_store(root) as store:
        context = make_context(engine, (MODEL,), ServerSettings(**settings))
        responses = ResponseRoutes(context, store.responses, retry_seconds=0.01)
        transport = httpx.ASGITransport(
            make_app(context, responses.routes()), raise_app_exceptions=False
        )
        async with (
            responses.running(),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            yield Site(store, engine, context, client)


async def test_an_open_response_runs_again_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that stops, or whose engine is lost, leaves it open; one line is logged."""
    async with serving(tmp_path) as site:
        waiting = await site.start(wait=True)
        await site.until(waiting, "in_progress")
        lost = [await site.start(die=True) for _ in range(2)]
        await until(lambda: len(site.engine.requests) == 3)
    assert [record.message for record in caplog.records] == [
        "background responses run again after a restart: no engine"
    ]
    engine = Engine()
    engine.go.set()
    async with serving(tmp_path, engine) as site:
        assert (await site.until(waiting, "completed"))["background"] is True
        for name in lost:
            assert name.startswith("resp_")
            assert (await site.get(name))["status"] == "queued"


async def test_a_response_that_runs_is_cancelled_or_deleted(tmp_path: Path) -> None:
    """The engine's request is stopped, and nothing is stored afterwards."""
    async with serving(tmp_path) as site:
        one, other = [await site.start(wait=True) for _ in range(2)]
        for name in (one, other):
            await site.until(name, "in_progress")
        cancelled = await site.client.post(f"{URL}/{one}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        assert (await site.client.delete(f"{URL}/{other}")).json()["deleted"] is True
        await until(lambda: not site.engine.running)
        assert (await site.get(one))["status"] == "cancelled"
        assert (await site.client.get(f"{URL}/{other}")).status_code == 404


async def test_too_many_open_responses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive together are counted, and a stopping server accepts none."""
    monkeypatch.setattr(response_routes, "MAX_OPEN", 5)
    async with serving(tmp_path) as site:
        sent = [site.post(background=True, wait=True) for _ in range(20)]
        statuses = [reply.status_code for reply in await asyncio.gather(*sent)]
        assert (statuses.count(200), statuses.count(429)) == (5, 15)
        site.context.admission.close()
        refused = await site.post(background=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"status": 400}, "invalid_prompt", "No."),
        ({"status": 429}, "rate_limit_exceeded", "No."),
        ({"status": "broken"}, "server_error", "Internal server error."),
    ],
)
async def test_a_failed_response_has_a_code_of_openais(
    tmp_path: Path, fields: dict[str, Any], code: str, message: str
) -> None:
    """Whatever the engine raises ends it."""
    async with serving(tmp_path) as site:
        response = await site.until(await site.start(**fields), "failed")
        assert response["error"] == {"code": code, "message": message}


async def test_disk_errors_lose_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A background response is stored later; an answer that cannot be stored is returned."""
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    async with serving(tmp_path) as site:
        table = site.store.responses
        end, failures = table.end, [full, OSError(5, "Input/output error")]

        def fails_twice(response: dict[str, Any]) -> None:
            if failures:
                raise failures.pop()
            end(response)

        def fails(*_: object) -> None:
            raise full

        monkeypatch.setattr(type(table), "end", lambda _, response: fails_twice(response))
        assert (await site.until(await site.start(), "completed"))["id"]
        assert not failures
        monkeypatch.setattr(type(table), "put", fails)
        answer = await site.post(store=True)
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        refused = await site.post(background=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")


async def test_a_continued_conversation_is_checked_as_a_body(tmp_path: Path) -> None:
    """Errors have the places of the new input, and the whole conversation has the size limit."""
    async with serving(tmp_path, max_body_bytes=2_000) as site:
        stored = await site.post(store=True, input="x" * 1_500)
        assert stored.json()["store"] is True
        fields = {"previous_response_id": stored.json()["id"], "background": True}
        invalid = await site.post(**fields, input=[{"role": "visitor", "content": "Hi"}])
        assert invalid.json()["error"]["param"] == "input.0.role"
        long = await site.post(**fields, input="y" * 500)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")
        unknown = await site.post(background=True, model="other")
        assert unknown.status_code == 404


async def test_a_background_response_has_the_whole_conversation(tmp_path: Path) -> None:
    """The engine gets all turns, although each is stored with a link to the one before."""
    engine = Engine()
    async with serving(tmp_path, engine) as site:
        name = (await site.post(store=True)).json()["id"]
        for text in ("b", "c"):
            name = await site.start(previous_response_id=name, input=text)
            await site.until(name, "completed")
        assert [item["content"] for item in engine.inputs[-1]] == ["Hi", "b", "c"]
        listed = (await site.client.get(f"{URL}/{name}/input_items?order=asc")).json()["data"]
        assert [item["content"][0]["text"] for item in listed] == ["Hi", "b", "c"]


async def test_input_items_are_listed_in_pages(tmp_path: Path) -> None:
    """The newest is first by default, as in OpenAI's API."""
    async with serving(tmp_path) as site:
        items = [{"role": "user", "content": str(number)} for number in range(25)]
        name = (await site.post(store=True, input=items)).json()["id"]
        texts, query = list[str](), "limit=10"
        for has_more in (True, True, False):
            found = (await site.client.get(f"{URL}/{name}/input_items?{query}")).json()
            assert found["has_more"] is has_more
            texts += [item["content"][0]["text"] for item in found["data"]]
            query = f"limit=10&after={found['last_id']}"
        assert texts == [str(number) for number in reversed(range(25))]
        [first] = (await site.client.get(f"{URL}/{name}/input_items?order=asc&limit=1")).json()[
            "data"
        ]
        assert first["content"] == [{"type": "input_text", "text": "0"}]
        unknown = await site.client.get(f"{URL}/{name}/input_items?after=x")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "after")


def turn(table: ResponseTable, number: int, text: str = "Hi") -> str:
    """Store the next turn of a conversation, and return its ID."""
    previous = str(number - 1) if number else None
    found = table.conversation(str(number - 1))
    earlier = [] if found is None else [*input_items(found.request), *found.response["output"]]
    response = {
        "id": str(number),
        "created_at": number,
        "status": "completed",
        "output": [{"role": "assistant", "content": f"{text}!"}],
        "previous_response_id": previous,
    }
    table.put(StoredResponse({"input": text}, response), earlier)
    return str(number)


def test_a_turn_is_stored_without_the_turns_before_it(tmp_path: Path) -> None:
    """The whole conversation is stored again after many turns only, so reading it is bounded."""
    with open_store(tmp_path) as store:
        for number in range(2 * MAX_LINKED + 1):
            turn(store.responses, number, str(number))
        sizes = store.database.read("SELECT length(request) FROM turns ORDER BY created")
        assert [i for i, (size,) in enumerate(sizes) if size > 20] == [MAX_LINKED, 2 * MAX_LINKED]
        last = store.responses.conversation(str(2 * MAX_LINKED))
        assert last is not None
        texts = [item["content"] for item in last.request["input"]]
        assert texts[:4] == ["0", "0!", "1", "1!"]
        assert texts[-2:] == [f"{2 * MAX_LINKED - 1}!", f"{2 * MAX_LINKED}"]
        assert len(texts) == 4 * MAX_LINKED + 1


@pytest.mark.parametrize("expires", [False, True])
def test_a_deleted_turn_stays_while_a_later_one_needs_it(tmp_path: Path, *, expires: bool) -> None:
    """It cannot be read or continued any more, and goes with the last turn that continued it."""
    with open_store(tmp_path) as store:
        table = store.responses
        for number in range(3):
            turn(table, number)
        if expires:
            table.delete_expired(STORED_SECONDS + 2)
        else:
            table.delete("0")
            table.delete("1")
        assert table.get("0") is None
        assert table.conversation("1") is None
        last = table.conversation("2")
        assert last is not None
        assert len(last.request["input"]) == 5
        table.delete("2")
        assert store.database.read("SELECT id FROM turns") == []


def test_a_turn_whose_previous_one_is_deleted_meanwhile_has_all_items(tmp_path: Path) -> None:
    """Nothing of the conversation is lost."""
    with open_store(tmp_path) as store:
        response = {"id": "b", "created_at": 1, "status": "queued", "previous_response_id": "a"}
        store.responses.put(StoredResponse({"input": "Hi"}, response), [{"role": "user"}])
        found = store.responses.get("b")
        assert found is not None
        assert found.request["input"] == [{"role": "user"}, {"role": "user", "content": "Hi"}]


async def test_old_responses_are_deleted_and_the_database_is_private(tmp_path: Path) -> None:
    """Its file is readable by its owner only."""
    async with serving(tmp_path) as site:
        for name, age in (("old", STORED_SECONDS + 9), ("new", STORED_SECONDS - 999)):
            created = int(time.time()) - age
            response = {"id": name, "created_at": created, "status": "completed"}
            site.store.responses.put(StoredResponse({}, response))
        site.store.delete_expired()
        assert site.store.responses.get("old") is None
        assert site.store.responses.get("new") is not None
        assert site.store.folder.database.stat().st_mode & 0o077 == 0
