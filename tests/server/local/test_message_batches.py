"""Anthropic's Message Batches API: from requests to results, with restarts and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.local.rig import MODEL, SECONDS, Local, ScriptedEngine, serving
from tidemill.batch.errors import InvalidMove
from tidemill.protocol import json_bodies
from tidemill.protocol.contract import Reply, Usage
from tidemill.server.local import message_batch_routes
from tidemill.server.local.results import Results, RowPage
from tidemill.server.local.rows import RowsGone

PATH = "/v1/messages/batches"
PARAMS: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hi"}],
}


class ChatEngine(ScriptedEngine):
    """Answers each chat with `Ho`, unless the script in its body fails."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Answer after the script, if any."""
        reply = await super().respond(url, {"say": "x", **body}, request_id, created)
        if reply.status_code != 200:
            words = f"`messages.{len(body['messages']) - 1}.content` is bad."
            reply.body["error"]["message"] = words
            return reply
        message = {"role": "assistant", "content": "Ho"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "chatcmpl-7", "model": MODEL, "choices": [choice], "created": created}
        return Reply(200, answer, Usage(10, 4, 3))


async def create(local: Local, *params: dict[str, Any]) -> dict[str, Any]:
    """Create a batch; request i has the custom ID `ri`."""
    requests = [
        {"custom_id": f"r{number}", "params": {**PARAMS, **each}}
        for number, each in enumerate(params)
    ]
    answer = await local.client.post(PATH, json={"requests": requests})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(local: Local, batch_id: str) -> dict[str, Any]:
    """Return a batch once it has ended."""
    async with asyncio.timeout(SECONDS):
        while True:
            batch = (await local.client.get(f"{PATH}/{batch_id}")).json()
            if batch["processing_status"] == "ended":
                return dict(batch)
            await asyncio.sleep(0.005)


async def results(local: Local, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a batch by custom ID."""
    answer = await local.client.get(batch["results_url"])
    assert answer.status_code == 200, answer.text
    rows = [json.loads(line) for line in answer.text.splitlines()]
    found = {row["custom_id"]: row["result"] for row in rows}
    assert len(found) == len(rows)
    return found


def counts(**some: int) -> dict[str, int]:
    """Return counts of requests, of which only some are not zero."""
    kinds = ("processing", "succeeded", "errored", "canceled", "expired")
    return dict.fromkeys(kinds, 0) | some


async def test_requests_become_results(tmp_path: Path) -> None:
    """Each has a message or an error, also after a restart of the server."""
    engine = ChatEngine()
    async with serving(tmp_path, engine) as local:
        bad = {"status": 400, "system": "Be brief."}
        made = await create(local, {"wait": True}, bad, {"status": 500})
        assert (made["type"], made["processing_status"]) == ("message_batch", "in_progress")
        assert made["request_counts"] == counts(processing=3)
        assert made["results_url"] is None
        early = await local.client.get(f"{PATH}/{made['id']}/results")
        assert (early.status_code, early.json()["type"]) == (400, "error")
    engine = ChatEngine()
    engine.go.set()
    async with serving(tmp_path, engine) as local:
        batch = await ended(local, made["id"])
        found = await results(local, batch)
        own = await local.batch(batch["id"].replace("msgbatch_", "batch_"))
    assert batch["request_counts"] == counts(succeeded=1, errored=2)
    assert batch["created_at"] <= batch["ended_at"] < batch["expires_at"]
    assert found["r0"]["type"] == "succeeded"
    assert found["r0"]["message"]["content"] == [{"type": "text", "text": "Ho"}]
    for name, kind in (("r1", "invalid_request_error"), ("r2", "api_error")):
        assert found[name]["type"] == "errored"
        assert found[name]["error"]["error"]["type"] == kind
        assert found[name]["error"]["error"]["message"] == "`messages.0.content` is bad."
    assert own["endpoint"] == "/v1/messages"


async def test_a_canceled_batch_has_a_result_for_each_request(tmp_path: Path) -> None:
    """Requests that did not run are canceled."""
    engine = ChatEngine()
    async with serving(tmp_path, engine) as local:
        made = await create(local, {}, {"wait": True}, {"wait": True})
        own = made["id"].replace("msgbatch_", "batch_")
        await local.until(own, lambda batch: batch["request_counts"]["completed"] == 1)
        answer = await local.client.post(f"{PATH}/{made['id']}/cancel")
        assert answer.json()["processing_status"] in {"canceling", "ended"}
        batch = await ended(local, made["id"])
        again = await local.client.post(f"{PATH}/{made['id']}/cancel")
        found = await results(local, batch)
    assert batch["cancel_initiated_at"] is not None
    assert batch["request_counts"] == counts(succeeded=1, canceled=2)
    assert {name: each["type"] for name, each in found.items()} == {
        "r0": "succeeded",
        "r1": "canceled",
        "r2": "canceled",
    }
    assert again.status_code == 200


async def test_a_batch_of_an_unknown_model_ends_with_errors(tmp_path: Path) -> None:
    """Each result says which models are served."""
    async with serving(tmp_path, ChatEngine()) as local:
        batch = await ended(local, (await create(local, *[{"model": "claude"}] * 2))["id"])
        found = await results(local, batch)
    assert batch["request_counts"] == counts(errored=2)
    assert [*found] == ["r0", "r1"]
    for result in found.values():
        assert result["type"] == "errored"
        assert MODEL in result["error"]["error"]["message"]


async def test_batches_are_listed_in_pages(tmp_path: Path) -> None:
    """Pages go back and forth, and other batches are not among them."""
    async with serving(tmp_path, ChatEngine()) as local:
        made = [(await create(local, {}))["id"] for _ in range(3)]
        other = await local.submit(
            b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
        )

        async def page(query: str) -> tuple[list[int], bool]:
            answer = (await local.client.get(f"{PATH}?{query}")).json()
            shown = [each["id"] for each in answer["data"]]
            assert (answer["first_id"], answer["last_id"]) == (shown[0], shown[-1])
            return [made.index(each) for each in shown], answer["has_more"]

        assert await page("") == ([2, 1, 0], False)
        assert await page("limit=2") == ([2, 1], True)
        assert await page(f"limit=2&after_id={made[1]}") == ([0], False)
        assert await page(f"limit=1&before_id={made[0]}") == ([1], True)
        assert await page(f"limit=5&before_id={made[0]}") == ([2, 1], False)
        for query in ("limit=0", "after_id=gone", f"after_id={made[0]}&before_id={made[1]}"):
            answer = await local.client.get(f"{PATH}?{query}")
            assert answer.status_code in {400, 404}
            assert answer.json()["type"] == "error"
        hidden = other["id"].replace("batch_", "msgbatch_")
        assert (await local.client.get(f"{PATH}/{hidden}")).status_code == 404


async def test_an_ended_batch_can_be_deleted(tmp_path: Path) -> None:
    """Its files go with it; a batch that runs must be canceled first."""
    engine = ChatEngine()
    async with serving(tmp_path, engine) as local:
        made = await create(local, {"wait": True})
        url = f"{PATH}/{made['id']}"
        assert (await local.client.delete(url)).status_code == 400
        engine.go.set()
        await ended(local, made["id"])
        answer = await local.client.delete(url)
        assert answer.json() == {"id": made["id"], "type": "message_batch_deleted"}
        assert (await local.client.get(url)).status_code == 404
        assert (await local.client.get("/v1/files")).json()["data"] == []
        assert not [*local.store.folder.files.iterdir()]
        for table in ("batches", "rows", "line_blocks", "history"):
            assert local.store.database.read(f"SELECT * FROM {table}") == []  # noqa: S608


async def test_results_of_deleted_files_are_gone(tmp_path: Path) -> None:
    """The error is in Anthropic's form, too."""
    async with serving(tmp_path, ChatEngine()) as local:
        batch = await ended(local, (await create(local, {}))["id"])
        for file in (await local.client.get("/v1/files")).json()["data"]:
            await local.client.delete(f"/v1/files/{file['id']}")
        answer = await local.client.get(batch["results_url"])
    assert answer.status_code == 410
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        (None, "requests"),
        ([], "requests"),
        ([3], "requests.0.custom_id"),
        ([{"custom_id": "a" * 65, "params": {}}], "requests.0.custom_id"),
        ([{"custom_id": "a"}], "requests.0.params"),
        ([{"custom_id": "a", "params": {}}] * 2, "requests.1.custom_id"),
    ],
)
async def test_an_invalid_body_is_refused(tmp_path: Path, requests: Any, param: str) -> None:
    """The error names the field."""
    async with serving(tmp_path, ChatEngine()) as local:
        answer = await local.client.post(PATH, json={"requests": requests})
        listed = (await local.client.get(PATH)).json()
    assert answer.status_code == 400
    assert f"`{param}`" in answer.json()["error"]["message"]
    assert listed == {"data": [], "has_more": False, "first_id": None, "last_id": None}


def body_of(num_requests: int) -> dict[str, Any]:
    """Return the body of a new batch."""
    return {"requests": [{"custom_id": f"r{n}", "params": PARAMS} for n in range(num_requests)]}


async def test_each_request_may_have_as_many_values_as_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch has the limit of requests; a body with other fields has that of a request."""
    monkeypatch.setattr(json_bodies, "MAX_CONTAINERS", 8)
    monkeypatch.setattr(message_batch_routes, "_PIECE_BYTES", 50)
    large = {**PARAMS, "stop_sequences": [[]] * 9}
    async with serving(tmp_path, ChatEngine()) as local:
        for body, status, words in (
            (body_of(9), 200, '"message_batch"'),
            (body_of(1) | {"other": [[]]}, 200, '"message_batch"'),
            ({"other": "]"} | body_of(1), 200, '"message_batch"'),
            (body_of(9) | {"other": 1}, 413, "The body has more than 8 lists and objects"),
            ({"requests": [{"params": large}]}, 413, "`requests.0` has more than 8 lists and"),
        ):
            answer = await local.client.post(PATH, json=body)
            assert (answer.status_code, words in answer.text) == (status, True), answer.text
            counted = answer.json().get("request_counts", {})
            assert sum(counted.values()) == (len(body["requests"]) if status == 200 else 0)
        monkeypatch.setattr(message_batch_routes, "_MAX_REQUESTS", 3)
        answer = await local.client.post(PATH, json=body_of(4))
        assert "must be a list of 1 to 100,000 requests; got more" in answer.text
        assert not [*local.store.folder.incoming.iterdir()]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"requests": [{"custom_id": "a", "params": {}}', "The body is not JSON"),
        (b'{"requests": [{"custom_id": "a", "params": {}},]}', "The body is not JSON"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, {"x" 1}]}', "`requests.1` is not JSON"),
        (b"[1]", "The body must be a JSON object"),
        (b"", "The body is not JSON"),
    ],
)
async def test_a_body_that_is_not_json_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    """The error is in Anthropic's form."""
    async with serving(tmp_path, ChatEngine()) as local:
        headers = {"Content-Type": "application/json"}
        answer = await local.client.post(PATH, content=data, headers=headers)
        listed = (await local.client.get("/v1/files")).json()["data"]
    assert (answer.status_code, answer.json()["type"], listed) == (400, "error", [])
    assert words in answer.json()["error"]["message"]


async def canceled(local: Local) -> dict[str, Any]:
    """Return a batch of three requests, one of which has run."""
    made = await create(local, {}, {"wait": True}, {"wait": True})
    own = made["id"].replace("msgbatch_", "batch_")
    await local.until(own, lambda batch: batch["request_counts"]["completed"] == 1)
    await local.client.post(f"{PATH}/{made['id']}/cancel")
    return await ended(local, made["id"])


async def test_results_need_the_requests_that_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their file may be deleted while results are sent; without it they are gone."""
    async with serving(tmp_path, ChatEngine()) as local:
        batch = await canceled(local)
        stored = local.store.batches.get(batch["id"].replace("msgbatch_", "batch_"))
        assert stored is not None
        page = Results.page

        def page_and_delete(*values: Any, **named: Any) -> RowPage:
            found = page(*values, **named)
            if found.rows == []:
                local.store.files.delete(stored.batch.input_file_id)
            return found

        monkeypatch.setattr(Results, "page", page_and_delete)
        assert [*await results(local, batch)] == ["r0", "r1", "r2"]
        answer = await local.client.get(batch["results_url"])
    assert answer.status_code == 410
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_results_may_fill_several_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has one result."""
    monkeypatch.setattr(message_batch_routes, "MAX_LISTED_ROWS", 2)
    async with serving(tmp_path, ChatEngine()) as local:
        batch = await ended(local, (await create(local, *[{}] * 5))["id"])
        assert [*await results(local, batch)] == ["r0", "r1", "r2", "r3", "r4"]


async def test_a_batch_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    """Other requests at that moment find neither rows nor a batch."""
    async with serving(tmp_path, ChatEngine()) as local:
        batch = await ended(local, (await create(local, {}))["id"])
        own = batch["id"].replace("msgbatch_", "batch_")
        stored = local.store.batches.get(own)
        assert stored is not None
        for _ in range(2):
            local.store.delete_batch(own)
        with pytest.raises(RowsGone):
            local.store.results.page(stored.batch, 0, 1)
        with pytest.raises(InvalidMove):
            await local.runner.cancel(own)


async def test_a_deleted_batch_takes_its_merged_retries_along(tmp_path: Path) -> None:
    """Results before and after each retry are deleted, too."""
    engine = ChatEngine()
    async with serving(tmp_path, engine) as local:
        batch = await ended(local, (await create(local, {}, {"status": 500}))["id"])
        own = batch["id"].replace("msgbatch_", "batch_")
        for _ in range(2):
            answer = await local.client.post(f"/v1/batches/{own}/retry", json={})
            assert answer.status_code == 200, answer.text
            await local.ended(answer.json()["id"])
        assert len((await local.client.get("/v1/files")).json()["data"]) > 4
        assert (await local.client.delete(f"{PATH}/{batch['id']}")).status_code == 200
        assert (await local.client.get("/v1/files")).json()["data"] == []
        assert not [*local.store.folder.files.iterdir()]
        for table in ("batches", "rows", "line_blocks", "history"):
            assert local.store.database.read(f"SELECT * FROM {table}") == []  # noqa: S608
