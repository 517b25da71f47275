"""Finished rows of a local server's batches, by line, during and after the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.server.local.rig import SECONDS, Local, ScriptedEngine, lines_of, serving


async def page(local: Local, batch_id: str, **params: int) -> httpx.Response:
    """Request a page of rows and return the response."""
    return await local.client.get(f"/v1/batches/{batch_id}/results", params=params)


async def until_listed(
    local: Local, batch_id: str, num_rows: int, *, through: int = 0
) -> dict[str, Any]:
    """Return the first page with this number of rows and all of the first lines."""
    async with asyncio.timeout(SECONDS):
        while True:
            found: dict[str, Any] = (await page(local, batch_id, limit=1000)).json()
            if len(found["data"]) >= num_rows and found["complete_through"] >= through:
                return found
            await asyncio.sleep(0.01)


def custom_ids(found: dict[str, Any]) -> list[str]:
    """Return the custom IDs of listed rows."""
    return [row["custom_id"] for row in found["data"]]


async def test_finished_rows_are_listed_while_others_are_running(tmp_path: Path) -> None:
    """Rows after a slow line are listed too, and the page says which lines are complete."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        lines = lines_of([{}, {}, {"wait": True}, {"status": 400}]).replace(b"\n", b"\n\n")
        batch = await local.submit(lines)
        found = await until_listed(local, batch["id"], 3, through=4)
        assert [row["line"] for row in found["data"]] == [1, 3, 7]
        assert (found["complete_through"], found["has_more"]) == (4, False)
        engine.go.set()
        await local.ended(batch["id"])
        found = (await page(local, batch["id"])).json()
    assert [row["line"] for row in found["data"]] == [1, 3, 5, 7]
    assert [row["response"]["status_code"] for row in found["data"]] == [200, 200, 200, 400]
    assert found["complete_through"] == 7


async def test_rows_of_an_ended_batch_are_listed_in_pages(tmp_path: Path) -> None:
    """Successes and errors come in line order, from their two files."""
    async with serving(tmp_path) as local:
        bodies = [{"status": 400 if number % 3 else 200} for number in range(25)]
        batch = await local.ended((await local.submit(lines_of(bodies)))["id"])
        listed, after, has_more = [], 0, True
        while has_more:
            found = (await page(local, batch["id"], after_line=after, limit=7)).json()
            listed += custom_ids(found)
            after, has_more = found["complete_through"], found["has_more"]
        output = await local.rows(batch["output_file_id"])
        first = (await page(local, batch["id"], limit=1)).json()["data"][0]
    assert listed == [f"c{number}" for number in range(25)]
    assert first == {"line": 1, **output[0]}


async def test_a_restarted_server_lists_the_same_rows(tmp_path: Path) -> None:
    """Both ended and running batches keep their rows."""
    bodies = [{}, {"wait": True}, {}]
    async with serving(tmp_path) as local:
        ended = await local.ended((await local.submit(lines_of([{}, {}])))["id"])
        going = await local.submit(lines_of(bodies))
        await until_listed(local, going["id"], 2)
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        assert custom_ids((await page(local, ended["id"])).json()) == ["c0", "c1"]
        assert custom_ids((await page(local, going["id"])).json()) == ["c0", "c2"]
        engine.go.set()
        await local.ended(going["id"])
        assert custom_ids((await page(local, going["id"])).json()) == ["c0", "c1", "c2"]


async def test_rows_of_deleted_files_are_gone(tmp_path: Path) -> None:
    """The error reports it, and the next server deletes their positions."""
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(lines_of([{}])))["id"])
        await local.client.delete(f"/v1/files/{batch['output_file_id']}")
        gone = await page(local, batch["id"])
    async with serving(tmp_path) as local:
        kept = local.store.database.read("SELECT count(*) FROM rows")
        still_gone = await page(local, batch["id"])
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "work_deleted")
    assert still_gone.json() == gone.json()
    assert kept == [(0,)]


async def test_a_refused_file_has_no_rows(tmp_path: Path) -> None:
    """A refused file has an empty page; an unknown batch is a 404, a bad parameter a 400."""
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(b"no json\n"))["id"])
        found = (await page(local, batch["id"])).json()
        assert found == {"object": "list", "data": [], "complete_through": 0, "has_more": False}
        assert (await page(local, "batch_1")).status_code == 404
        assert (await page(local, batch["id"], limit=0)).status_code == 400


async def test_history_has_the_rows_that_ran(tmp_path: Path) -> None:
    """They are summed per minute, across a restart; expired lines never ran."""
    async with serving(tmp_path) as local:
        batch = await local.submit(lines_of([{}, {"status": 400}, {"wait": True}, {"wait": True}]))
        await local.until(batch["id"], lambda batch: batch["request_counts"]["failed"] == 1)
    engine = ScriptedEngine()
    async with serving(tmp_path, engine, clock=lambda: batch["expires_at"] + 1.0) as local:
        assert (await local.ended(batch["id"]))["status"] == "expired"
        found = (await local.client.get(f"/v1/batches/{batch['id']}/history")).json()["data"]
        sums = {name: sum(bucket[name] for bucket in found) for name in found[0]}
        assert {name: sums[name] for name in ("completed", "failed", "tokens", "input_tokens")} == {
            "completed": 1,
            "failed": 1,
            "tokens": 3,
            "input_tokens": 11,
        }
        assert {bucket["seconds"] for bucket in found} == {60}
        unknown = await local.client.get("/v1/batches/batch_1/history")
        assert unknown.status_code == 404
