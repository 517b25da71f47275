"""Batches of a local server: from a file to its rows, with faults and restarts in between."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch, FileObject
from pydantic_core import to_json

from tests.server.local.rig import MODEL, ScriptedEngine, lines_of, serving
from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.protocol.contract import Reply, Usage


async def test_a_file_becomes_rows_in_input_order(tmp_path: Path) -> None:
    """Successes and failures are separate, counted and summed as in the cloud."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}, {"status": 400}, {}]), metadata={"k": "v"})
        batch = await local.ended(batch["id"])
        rows = await local.rows(batch["output_file_id"])
        failed = await local.rows(batch["error_file_id"])
    assert batch["status"] == "completed"
    assert [row["custom_id"] for row in rows] == ["c0", "c2"]
    assert [row["response"]["status_code"] for row in failed] == [400]
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["usage"]["input_tokens"] == 21
    assert batch["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    assert batch["model"] == MODEL
    assert batch["metadata"] == {"k": "v"}
    Batch.model_validate(batch, strict=True)


async def test_rows_that_finish_in_any_order_are_published_in_line_order(
    tmp_path: Path,
) -> None:
    """There are many more lines than run at once."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        bodies = [{"wait": number % 7 == 0} for number in range(200)]
        batch = await local.submit(lines_of(bodies))
        await local.until(batch["id"], lambda _: engine.running == 16)
        engine.go.set()
        batch = await local.ended(batch["id"])
        rows = await local.rows(batch["output_file_id"])
    assert [row["custom_id"] for row in rows] == [f"c{number}" for number in range(200)]
    assert engine.most_running == 16
    assert len(engine.requests) == 200


async def test_every_reader_sees_one_line_per_row(tmp_path: Path) -> None:
    """A client's `iter_lines`, which also splits at U+2028, yields whole rows."""
    say = "a\u2028b\u2029c\x85d"
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{"say": say}, {"status": 400}]))
        batch = await local.ended(batch["id"])
        rows = []
        for name in ("output_file_id", "error_file_id"):
            url = f"/v1/files/{batch[name]}/content"
            async with local.client.stream("GET", url) as answer:
                rows += [json.loads(row) async for row in answer.aiter_lines()]
    assert [row["custom_id"] for row in rows] == ["c0", "c1"]
    assert rows[0]["response"]["body"]["say"] == say


async def test_truncated_answers_are_counted(tmp_path: Path) -> None:
    """They count as completed rows of the batch, also after a restart."""
    engine = ChoosingEngine()
    async with serving(tmp_path, engine) as local:
        bodies: list[dict[str, Any]] = [{"finish": each} for each in ("length", "stop", "length")]
        bodies.append({"status": 400})
        batch = await local.submit(lines_of(bodies))
        batch = await local.ended(batch["id"])
    async with serving(tmp_path) as local:
        again = await local.batch(batch["id"])
    for each in (batch, again):
        assert each["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        assert each["tidemill"]["truncated_rows"] == 2
        Batch.model_validate(each, strict=True)


class ChoosingEngine(ScriptedEngine):
    """Answers with a choice whose finish reason is in the body."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script in the body."""
        if "finish" not in body:
            return await super().respond(url, body, request_id, created)
        choice = {"message": {"content": "x"}, "finish_reason": body["finish"]}
        return Reply(200, {"created": created, "choices": [choice]}, Usage(10, 4, 3))


async def test_a_batch_without_a_success_has_no_output(tmp_path: Path) -> None:
    """The batch is still completed, as in the cloud, and describes its engine."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{"status": 500}]))
        batch = await local.ended(batch["id"])
    assert batch["status"] == "completed"
    assert batch["output_file_id"] is None
    assert batch["error_file_id"] is not None
    known = batch["tidemill"]
    assert (known["model_revision"], known["engine_version"]) == (None, "test")
    assert known["labels_spans"]


@pytest.mark.parametrize("form", ["gzip", "array"])
async def test_other_file_formats_are_accepted(tmp_path: Path, form: str) -> None:
    """The server accepts the same formats as a deployment's intake."""
    data = lines_of([{}, {}])
    packed = gzip.compress(data)
    array = b"[" + b",".join(data.splitlines()) + b"]"
    async with serving(tmp_path) as local:
        batch = await local.submit(packed if form == "gzip" else array)
        batch = await local.ended(batch["id"])
        rows = await local.rows(batch["output_file_id"])
        stored = local.store.batches.get(batch["id"])
    assert [row["custom_id"] for row in rows] == ["c0", "c1"]
    assert stored is not None
    assert stored.progress.expected == stored.batch.expected != NO_TOKENS


async def test_another_vendors_file_is_read_and_retried(tmp_path: Path) -> None:
    """Its requests without a URL have that of the batch, and its lines are shown as requests."""
    body = {"model": MODEL, "say": "Hi", "messages": [], "status": 400}
    lines = [{"custom_id": name, "body": {**body, "say": name}} for name in "ab"]
    data = b"\n\n".join(json.dumps(line).encode() for line in lines)
    async with serving(tmp_path) as local:
        batch = await local.submit(data)
        batch = await local.ended(batch["id"])
        failed = await local.rows(batch["error_file_id"])
        stored = local.store.batches.get(batch["id"])
        assert stored is not None
        shown = local.store.input_lines.read(stored, [3])
    assert [row["custom_id"] for row in failed] == ["a", "b"]
    assert json.loads(shown[3]) == {**lines[1], "method": "POST", "url": "/v1/chat/completions"}


async def test_rows_have_echoed_fields(tmp_path: Path) -> None:
    """Retries have them too, and so do the lines of an expired batch; chats in their bodies."""
    chats = [
        {"id": each, "messages": [], "model": MODEL, "say": each, "label": n, "status": 500}
        for n, each in enumerate("ab")
    ]
    data = b"\n".join(map(to_json, chats))
    late = asyncio.Event()

    def clock() -> float:
        return time.time() + 10**6 * late.is_set()

    async with serving(tmp_path, clock=clock) as local:
        old = await local.ended((await local.submit(data, echo_fields=["label"]))["id"])
        assert [row["label"] for row in await local.rows(old["error_file_id"])] == [0, 1]
        url = f"/v1/batches/{old['id']}/retry"
        made = (await local.client.post(url, json={"body": {"status": 200}})).json()
        await local.ended(made["id"])
        merged = await local.rows((await local.batch(old["id"]))["output_file_id"])
        assert [(row["custom_id"], row["label"]) for row in merged] == [("a", 0), ("b", 1)]
        requests = [json.loads(line) for line in lines_of([{}, {"wait": True}, {}]).splitlines()]
        data = b"\n".join(to_json({**each, "label": each["custom_id"]}) for each in requests)
        batch = await local.submit(data, echo_fields=["label"])
        await local.until(batch["id"], lambda now: now["request_counts"]["completed"] == 2)
    late.set()
    async with serving(tmp_path, clock=clock) as local:
        batch = await local.ended(batch["id"])
        rows = [await local.rows(batch[f"{kind}_file_id"]) for kind in ("output", "error")]
    assert [[row["label"] for row in each] for each in rows] == [["c0", "c2"], ["c1"]]


async def test_an_invalid_file_fails_with_all_of_its_errors(tmp_path: Path) -> None:
    """No line of it runs."""
    data = lines_of([{}, {"stream": True}, {"model": "other"}]) + b"no json\n"
    async with serving(tmp_path) as local:
        batch = await local.submit(data + lines_of([{}]))
        batch = await local.ended(batch["id"])
        requests = local.engine.requests
    assert batch["status"] == "failed"
    assert [(error["code"], error["line"]) for error in batch["errors"]["data"]] == [
        ("stream_not_supported", 2),
        ("model_not_found", 3),
        ("invalid_json_line", 4),
        ("duplicate_custom_id", 5),
    ]
    assert requests == []
    assert batch["output_file_id"] is None
    [message] = [error["message"] for error in batch["errors"]["data"] if error["line"] == 3]
    assert "`--served-model-name`" in message
    assert "`--any-model`" in message
    assert "aliases" not in message  # only a deployment has them


async def test_invalid_lines_get_a_row_with_the_skip_option(tmp_path: Path) -> None:
    """The other lines run."""
    async with serving(tmp_path) as local:
        batch = await local.submit(b"no json\n" + lines_of([{}]), on_invalid_line="skip")
        batch = await local.ended(batch["id"])
        failed = await local.rows(batch["error_file_id"])
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert failed[0]["error"]["code"] == "invalid_json_line"


async def test_unknown_parameters_are_counted_in_the_batch(tmp_path: Path) -> None:
    """In a batch with `strict_parameters` they are errors."""
    async with serving(tmp_path) as local:
        data = lines_of([{}, {"temprature": 1}])
        batch = await local.ended((await local.submit(data))["id"])
        strict = await local.ended((await local.submit(data, strict_parameters=True))["id"])
    unknown = {each["name"]: each for each in batch["tidemill"]["unknown_parameters"]}
    assert (unknown["temprature"]["count"], unknown["temprature"]["first_line"]) == (1, 2)
    assert (batch["status"], strict["status"]) == ("completed", "failed")
    assert {error["code"] for error in strict["errors"]["data"]} == {"unknown_parameter"}


async def test_finished_rows_of_a_cancelled_batch_are_kept(tmp_path: Path) -> None:
    """Requests in flight are dropped and not counted; a second cancel changes nothing."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": number > 4} for number in range(100)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
        cancelled = await local.client.post(f"/v1/batches/{batch['id']}/cancel")
        batch = await local.ended(batch["id"])
        again = await local.client.post(f"/v1/batches/{batch['id']}/cancel")
        rows = await local.rows(batch["output_file_id"])
    assert cancelled.json()["status"] in {"cancelling", "cancelled"}
    assert batch["status"] == "cancelled"
    assert [row["custom_id"] for row in rows] == [f"c{number}" for number in range(5)]
    assert batch["request_counts"] == {"total": 100, "completed": 5, "failed": 0}
    assert batch["error_file_id"] is None
    assert engine.running == 0
    assert again.json()["status"] == "cancelled"


async def test_a_batch_that_has_ended_cannot_be_cancelled(tmp_path: Path) -> None:
    """The error contains the batch's status."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}]))
        await local.ended(batch["id"])
        refused = await local.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "not_cancellable"
    assert "completed" in refused.json()["error"]["message"]


async def test_an_expired_batch_reports_the_lines_that_did_not_run(
    tmp_path: Path,
) -> None:
    """Finished rows are kept; the others do not count as failures."""
    late = asyncio.Event()

    def clock() -> float:
        return time.time() + 10**6 * late.is_set()

    engine = ScriptedEngine()
    async with serving(tmp_path, engine, clock=clock) as local:
        batch = await local.submit(lines_of([{"wait": number > 1} for number in range(40)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
    late.set()
    async with serving(tmp_path, engine, clock=clock) as local:
        batch = await local.ended(batch["id"])
        rows = await local.rows(batch["output_file_id"])
        failed = await local.rows(batch["error_file_id"])
    assert batch["status"] == "expired"
    assert [row["custom_id"] for row in rows] == ["c0", "c1"]
    assert [row["custom_id"] for row in failed] == [f"c{number}" for number in range(2, 40)]
    assert {row["error"]["code"] for row in failed} == {"batch_expired"}
    assert batch["request_counts"] == {"total": 40, "completed": 2, "failed": 0}


async def test_a_restarted_server_resumes_its_batches(tmp_path: Path) -> None:
    """No line with a row runs again, and none is skipped."""
    bodies = [{"wait": 10 <= number < 20} for number in range(60)]
    first = ScriptedEngine()
    async with serving(tmp_path, first) as local:
        batch = await local.submit(lines_of(bodies))
        await local.until(batch["id"], lambda _: first.running == 10 and len(first.requests) == 60)
    second = ScriptedEngine()
    second.go.set()
    async with serving(tmp_path, second) as local:
        ended = await local.ended(batch["id"])
        rows = await local.rows(ended["output_file_id"])
    assert sorted(second.requests) == [f"s{number}" for number in range(10, 20)]
    assert [row["custom_id"] for row in rows] == [f"c{number}" for number in range(60)]
    assert {row["response"]["body"]["created"] for row in rows} == {batch["created_at"]}


async def test_counts_only_grow(tmp_path: Path) -> None:
    """The counts never decrease between polls, also across a restart."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": number > 30} for number in range(60)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
        seen = local.seen
    engine = ScriptedEngine()
    engine.go.set()
    async with serving(tmp_path, engine) as local:
        await local.ended(batch["id"])
        seen += local.seen
    counts = [one["request_counts"]["completed"] for one in seen]
    assert counts == sorted(counts)
    assert counts[-1] == 60


async def test_concurrent_batches_take_turns(tmp_path: Path) -> None:
    """A small batch does not wait for the end of a large one."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        large = await local.submit(lines_of([{"wait": "permit"}] * 100))
        await local.until(large["id"], lambda _: engine.running == 16)
        small = await local.submit(lines_of([{"wait": "permit"}] * 3))
        await local.until(small["id"], lambda _: len(local.runner._in_flight._waiters) == 2)
        for _ in range(60):  # the last line of the large one starts once 84 have ended
            engine.permits.release()
        await local.ended(small["id"])
        state = await local.batch(large["id"])
    assert state["status"] == "in_progress"


async def test_a_batch_with_priority_comes_before_others(tmp_path: Path) -> None:
    """It also needs no slot of theirs; one of eight lines is still of an earlier batch."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        others = [
            await local.submit(lines_of([{"wait": "permit", "say": "other"}] * 60))
            for _ in range(2)
        ]
        await local.until(others[0]["id"], lambda _: len(local.runner._in_flight._waiters) == 2)
        first = await local.submit(lines_of([{"wait": "permit", "say": "first"}] * 20), priority=-1)
        await local.until(first["id"], lambda _: len(local.runner._in_flight._waiters) == 3)
        del engine.requests[:]
        for _ in range(45):  # the first 18 lines are of others, and then one of eight
            engine.permits.release()
        await local.ended(first["id"])
        shown = await local.batch(first["id"])
    assert shown["tidemill"]["priority"] == -1
    assert engine.requests[:25].count("first") == 20


async def test_a_file_may_be_deleted_while_a_batch_uses_it(tmp_path: Path) -> None:
    """The batch continues, as in the cloud."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": True}] * 40))
        await local.until(batch["id"], lambda _: engine.running == 16)
        deleted = await local.client.delete(f"/v1/files/{batch['input_file_id']}")
        engine.go.set()
        ended = await local.ended(batch["id"])
        gone = await local.client.get(f"/v1/files/{batch['input_file_id']}")
    assert deleted.json() == {"id": batch["input_file_id"], "object": "file", "deleted": True}
    assert ended["request_counts"]["completed"] == 40
    assert gone.status_code == 404


async def test_a_missing_input_fails_its_batch_with_a_message(tmp_path: Path) -> None:
    """Finished rows are kept."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": number > 2} for number in range(40)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
    (tmp_path / "work" / batch["id"] / "input").unlink()
    async with serving(tmp_path, engine) as local:
        ended = await local.ended(batch["id"])
        rows = await local.rows(ended["output_file_id"])
    assert ended["status"] == "failed"
    assert [error["code"] for error in ended["errors"]["data"]] == ["input_gone"]
    assert len(rows) == 3


async def test_missing_rows_fail_their_batch_with_a_message(tmp_path: Path) -> None:
    """The server does not invent rows."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": number > 2} for number in range(40)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
    (tmp_path / "work" / batch["id"] / "rows").write_bytes(b"")
    async with serving(tmp_path, engine) as local:
        ended = await local.ended(batch["id"])
    assert ended["status"] == "failed"
    assert [error["code"] for error in ended["errors"]["data"]] == ["rows_gone"]


async def test_a_torn_tail_is_dropped_and_its_lines_run_again(tmp_path: Path) -> None:
    """Bytes after the last recorded row belong to an unfinished write."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{"wait": number > 2} for number in range(20)]))
        await local.until(batch["id"], lambda _: engine.running == 16)
    with (tmp_path / "work" / batch["id"] / "rows").open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"c')
    engine.go.set()
    async with serving(tmp_path, engine) as local:
        ended = await local.ended(batch["id"])
        rows = await local.rows(ended["output_file_id"])
    assert [row["custom_id"] for row in rows] == [f"c{number}" for number in range(20)]


async def test_a_failed_engine_leaves_its_batches_to_the_next_server(tmp_path: Path) -> None:
    """The batch object contains the reason for the delay."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}, {"die": True}]))
        held = await local.until(batch["id"], lambda batch: batch["errors"] is not None)
    assert held["status"] == "in_progress"
    assert [error["code"] for error in held["errors"]["data"]] == ["engine_error"]


async def test_a_list_pages_through_all_batches_newest_first(tmp_path: Path) -> None:
    """Only the last page has no more after it."""
    async with serving(tmp_path) as local:
        made = [(await local.submit(lines_of([{}])))["id"] for _ in range(5)]
        first = (await local.client.get("/v1/batches", params={"limit": 3})).json()
        second = (
            await local.client.get("/v1/batches", params={"limit": 3, "after": first["last_id"]})
        ).json()
        third = (await local.client.get("/v1/batches", params={"after": second["last_id"]})).json()
    assert [batch["id"] for batch in first["data"] + second["data"]] == made[::-1]
    assert (first["has_more"], second["has_more"], third["has_more"]) == (True, False, False)
    assert third["data"] == []


async def test_fifty_batches_of_one_second_are_listed_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of creation decides, although all have the same `created_at`."""
    async with serving(tmp_path) as local:
        monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
        made = [(await local.submit(lines_of([{}])))["id"] for _ in range(50)]
        listed = (await local.client.get("/v1/batches", params={"limit": 50})).json()["data"]
        files = (await local.client.get("/v1/files", params={"purpose": "batch"})).json()["data"]
    assert [batch["id"] for batch in listed] == made[::-1]
    assert {batch["created_at"] for batch in listed} == {1_800_000_000}
    assert [file["id"] for file in files] == [batch["input_file_id"] for batch in listed]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"input_file_id": "s3://b/k"}, "input_file_id"),
        ({"endpoint": "/v1/nonsense"}, "endpoint"),
        ({"completion_window": "1s"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_url": "https://example.com/x"}, "output_url"),
        ({"webhook_url": "https://example.com/x"}, "webhook_url"),
        ({"priority": 101}, "priority"),
        ({"priority": True}, "priority"),
        ({"echo_fields": ["body"]}, "echo_fields"),
        ({"input_file_id": None}, "input_file_id"),
        ({"recipe": {"prompt": "{{ text }}"}}, "recipe"),
    ],
    ids="no_file bucket endpoint window metadata output webhook high bool echo null recipe".split(),
)
async def test_an_invalid_parameter_is_refused_at_once(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    """The error names the parameter, and no batch is created."""
    async with serving(tmp_path) as local:
        uploaded = (await local.upload(lines_of([{}]))).json()
        requests = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions"} | body
        refused = await local.client.post("/v1/batches", json=requests)
        listed = (await local.client.get("/v1/batches")).json()
        empty = (await local.client.post("/v1/batches", json={})).json()["error"]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert listed["data"] == []
    assert empty["message"] == "`input_file_id` is required."


async def test_a_repeated_request_with_an_idempotency_key_creates_one_batch(tmp_path: Path) -> None:
    """The same key with different parameters is refused."""
    async with serving(tmp_path) as local:
        uploaded = (await local.upload(lines_of([{}]))).json()
        requests = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions"}
        header = {"Idempotency-Key": "mine"}
        first = await local.client.post("/v1/batches", json=requests, headers=header)
        second = await local.client.post("/v1/batches", json=requests, headers=header)
        other = await local.client.post(
            "/v1/batches", json=requests | {"metadata": {"k": "v"}}, headers=header
        )
    assert first.json()["id"] == second.json()["id"]
    assert other.status_code == 400
    assert other.json()["error"]["code"] == "idempotency_key_reused"


async def test_the_leftovers_of_a_killed_server_are_deleted(tmp_path: Path) -> None:
    """Only work of ended batches, partial uploads and bytes without a file are deleted."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}]))
        batch = await local.ended(batch["id"])
    strays = [
        *("work/batch_of_nobody", f"work/{batch['id']}", "uploads/upload_of_nobody"),
        *("incoming/half", "files/stray"),
    ]
    for stray in strays:
        path = tmp_path / stray
        # The batch's own folder may not have been deleted yet.
        path.mkdir(exist_ok=True) if "_" in stray else path.touch()
    async with serving(tmp_path) as local:
        rows = await local.rows(batch["output_file_id"])
    assert [stray for stray in strays if (tmp_path / stray).exists()] == []
    assert len(rows) == 1


async def test_the_files_api_matches_openai(tmp_path: Path) -> None:
    """Files are created, listed by purpose, retrieved, downloaded and deleted."""
    data = lines_of([{}])
    async with serving(tmp_path) as local:
        uploaded = await local.upload(data)
        batch = await local.submit(data)
        batch = await local.ended(batch["id"])
        inputs = (await local.client.get("/v1/files", params={"purpose": "batch"})).json()
        oldest = (await local.client.get("/v1/files", params={"order": "asc", "limit": 1})).json()
        content = await local.client.get(f"/v1/files/{uploaded.json()['id']}/content")
        output = (await local.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    FileObject.model_validate(uploaded.json(), strict=True)
    assert uploaded.json()["bytes"] == len(data)
    assert len(inputs["data"]) == 2
    assert oldest["data"][0]["id"] == uploaded.json()["id"]
    assert oldest["has_more"]
    assert content.content == data
    assert output["purpose"] == "batch_output"
    assert output["filename"] == f"{batch['id']}.jsonl"


@pytest.mark.parametrize("order", [["purpose", "file"], ["file", "purpose"]], ids=" ".join)
async def test_form_fields_may_come_in_any_order(tmp_path: Path, order: list[str]) -> None:
    """Their order in a form has no meaning."""
    parts = {
        "file": b'Content-Disposition: form-data; name="file"; filename="upload"\r\n\r\n'
        + lines_of([{}]),
        "purpose": b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
    }
    body = b"".join(b"--b\r\n" + parts[name] + b"\r\n" for name in order) + b"--b--\r\n"
    async with serving(tmp_path) as local:
        made = await local.client.post(
            "/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"}
        )
    assert made.status_code == 200
    assert made.json()["bytes"] == len(lines_of([{}]))
    assert made.json()["filename"] == "upload"


async def test_a_file_above_the_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit also applies to uploads without a Content-Length header."""
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
        + b"x" * 5000
        + b"\r\n--b--\r\n"
    )

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with serving(tmp_path, max_file_bytes=1000) as local:
        refused = await local.client.post(
            "/v1/files",
            content=pieces(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
        )
    assert refused.status_code == 413
    assert list((tmp_path / "incoming").iterdir()) == []
    assert list((tmp_path / "files").iterdir()) == []


async def test_a_file_whose_bytes_are_missing_is_reported(tmp_path: Path) -> None:
    """Its bytes were removed from the data folder."""
    async with serving(tmp_path) as local:
        uploaded = (await local.upload(b"x")).json()
        (tmp_path / "files" / uploaded["id"]).unlink()
        gone = await local.client.get(f"/v1/files/{uploaded['id']}/content")
        made = await local.client.post(
            "/v1/batches",
            json={"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions"},
        )
    assert gone.status_code == 410
    assert gone.json()["error"]["code"] == "content_gone"
    assert made.status_code == 400
    assert made.json()["error"]["param"] == "input_file_id"


async def test_the_batch_object_matches_openai(tmp_path: Path) -> None:
    """Every key is present from the first response on."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}]))
    Batch.model_validate(json.loads(json.dumps(batch)), strict=True)
