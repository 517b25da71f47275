"""Retries of a local server's batches: the selected lines, and the merged rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.local.rig import Local, ScriptedEngine, lines_of, serving


async def retried(local: Local, batch_id: str, **fields: Any) -> dict[str, Any]:
    """Return the retry of a batch at its end."""
    answer = await local.client.post(f"/v1/batches/{batch_id}/retry", json=fields)
    assert answer.status_code == 200, answer.text
    return await local.ended(answer.json()["id"])


async def statuses(local: Local, file_id: str | None) -> dict[str, int]:
    """Return the status of each row of a file, in their order."""
    rows = await local.rows(file_id)
    return {row["custom_id"]: row["response"]["status_code"] for row in rows}


async def test_failed_requests_run_again_and_their_rows_are_merged(tmp_path: Path) -> None:
    """Only they are edited; a retry of the retry retries the first batch."""
    bodies = [{}, {"status": 500}, {"status": 400}, {}, {"status": 500, "say": "x"}]
    async with serving(tmp_path) as local:
        old = await local.ended((await local.submit(lines_of(bodies), metadata={"a": "b"}))["id"])
        made = await retried(local, old["id"], body={"status": 503})
        assert made["metadata"] == {"a": "b", "retry_of": old["id"]}
        assert made["tidemill"]["retry_of"] == old["id"]
        assert (await local.batch(old["id"]))["tidemill"]["retried_by"] == made["id"]
        assert local.engine.requests[5:] == ["s1", "x"]
        assert await statuses(local, made["error_file_id"]) == {"c1": 503, "c4": 503}
        again = await retried(local, made["id"], body={"status": None})
        assert (again["tidemill"]["retry_of"], again["tidemill"]["merge"]) == (old["id"], "done")
        now = await local.batch(old["id"])
        assert now["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
        good = ["c0", "c1", "c3", "c4"]
        assert await statuses(local, now["output_file_id"]) == dict.fromkeys(good, 200)
        assert await statuses(local, now["error_file_id"]) == {"c2": 400}
        listed = (await local.client.get(f"/v1/batches/{old['id']}/results")).json()["data"]
        assert [(row["line"], row["response"]["status_code"]) for row in listed] == [
            *((1, 200), (2, 200), (3, 400), (4, 200), (5, 200))
        ]
        # The files before the merge keep their IDs and their rows.
        assert await statuses(local, old["output_file_id"]) == {"c0": 200, "c3": 200}
        name = (await local.client.get(f"/v1/files/{again['input_file_id']}")).json()["filename"]
        assert name == "in.retry.jsonl"


async def test_requests_that_were_not_run_are_retried(tmp_path: Path) -> None:
    """They have no row in a cancelled batch."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([{}, {"wait": True}]))
        await local.until(batch["id"], lambda now: now["request_counts"]["completed"] == 1)
        await local.client.post(f"/v1/batches/{batch['id']}/cancel")
        await local.ended(batch["id"])
        engine.go.set()
        made = await retried(local, batch["id"])
        assert await statuses(local, made["output_file_id"]) == {"c1": 200}
        now = await local.batch(batch["id"])
        assert await statuses(local, now["output_file_id"]) == {"c0": 200, "c1": 200}


async def test_malformed_lines_keep_their_errors(tmp_path: Path) -> None:
    """They are never retried, also if they look like another request."""
    good = lines_of([{}, {"status": 500}, {"status": 400}])
    lines = b'{"custom_id":"c1","x":}\n\xff\n' + good + b'{"custom_id":"c9","body":1}\n'
    async with serving(tmp_path) as local:
        old = await local.submit(lines, on_invalid_line="skip")
        old = await local.ended(old["id"])
        await retried(local, old["id"], include_invalid=True, body={"status": None})
        now = await local.batch(old["id"])
        assert await statuses(local, now["output_file_id"]) == dict.fromkeys(
            ["c0", "c1", "c2"], 200
        )
        errors = await local.rows(now["error_file_id"])
        assert [row["error"]["line"] for row in errors] == [1, 2, 6]


@pytest.mark.parametrize(
    ("bodies", "fields", "code"),
    [
        ([{}], {}, "nothing_to_retry"),
        ([{"status": 400}], {}, "nothing_to_retry"),
        ([{"status": 500}], {"prompt": "x"}, "invalid_option"),
        ([{"status": 500}], {"body": 1}, "invalid_parameter"),
    ],
)
async def test_retries_that_cannot_be_made_are_refused(
    tmp_path: Path, bodies: list[dict[str, Any]], fields: dict[str, Any], code: str
) -> None:
    """Each refusal has its code, and no batch is created."""
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(lines_of(bodies)))["id"])
        answer = await local.client.post(f"/v1/batches/{batch['id']}/retry", json=fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        listed = (await local.client.get("/v1/batches")).json()["data"]
        assert [each["id"] for each in listed] == [batch["id"]]


async def test_deleted_rows_cannot_be_retried(tmp_path: Path) -> None:
    """The answer is 410; a repeated request with an idempotency key returns the first batch."""
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(lines_of([{"status": 500}])))["id"])
        url, key = f"/v1/batches/{batch['id']}/retry", {"idempotency_key": "k"}
        first = (await local.client.post(url, json=key)).json()["id"]
        assert (await local.client.post(url, json=key)).json()["id"] == first
        other = await local.client.post(url, json=key | {"include_invalid": True})
        assert other.json()["error"]["code"] == "idempotency_key_reused"
        await local.ended(first)
        now = await local.batch(batch["id"])
        await local.client.delete(f"/v1/files/{now['error_file_id']}")
        assert (await local.client.post(url, json={})).status_code == 410
