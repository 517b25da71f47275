"""Rows of a local server's batches on the dashboard: searches, requests, and what they read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bench.server.row_pages import Figures, fill
from tests.server.local.rig import Local, ScriptedEngine, lines_of, serving
from tests.server.local.test_retry import retried
from tidemill.dashboard.row_query import RowQuery
from tidemill.protocol.contract import Reply
from tidemill.server.local import input_lines
from tidemill.server.local.store import open_store

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x07"
LINE = re.compile(r'id="row-(\d+)"')


def reply(text: str, reason: str = "stop") -> dict[str, Any]:
    """Return a body whose answer is a text."""
    return {"reply": {"choices": [{"message": {"content": text}, "finish_reason": reason}]}}


BODIES = [
    reply(f"answer {HOSTILE}"),
    reply('{"topic": "billing"}'),
    {"status": 400},
    reply("x" * 3000, "length"),
]


async def view(local: Local, batch_id: str, query: str = "", name: str = "rows") -> str:
    """Return a view of a batch; it contains no markup and no invisible characters of users."""
    found = await local.client.get(f"/dashboard/view/batches/{batch_id}/{name}?{query}")
    assert found.status_code == 200, found.text
    for hidden in ("<script", "<img", "\u202e", "\x07"):
        assert hidden not in found.text
    return found.text


async def lines_found(local: Local, batch_id: str, query: str) -> list[int]:
    """Return the lines of the rows that match."""
    return [int(line) for line in LINE.findall(await view(local, batch_id, query))]


QUERIES = [
    ("status=all", [1, 2, 3, 4]),
    ("", [3]),
    ("status=truncated", [4]),
    ("status=ok", [1, 2]),
    ("text=BILLING", [2]),
    ("code=400", [3]),
    ("reason=length", [4]),
    ("id=c0", [1]),
    ("min_chars=3000", [4]),
    ("line=2", [2]),
    ("line=9", []),
    ("status=all&after=2", [3, 4]),
]


async def test_rows_are_searched_during_the_run_and_afterwards(tmp_path: Path) -> None:
    """Each condition finds the same rows; a bad one has a message."""
    engine = ScriptedEngine()
    async with serving(tmp_path, engine) as local:
        batch = await local.submit(lines_of([*BODIES, {"wait": True}]))
        await local.until(batch["id"], lambda now: sum(now["request_counts"].values()) == 5 + 4)
        for query, lines in QUERIES:
            assert await lines_found(local, batch["id"], query) == lines, query
        assert "This line has no row yet." in await view(local, batch["id"], "line=5")
        assert "whole number" in await view(local, batch["id"], "min_chars=x")
        first = await view(local, batch["id"], name="first-rows")
        assert LINE.findall(first) == ["3"]
        engine.go.set()
        await local.ended(batch["id"])
        for query, lines in QUERIES:
            assert await lines_found(local, batch["id"], query) == [
                *lines,
                *([5] if query.startswith(("status=all", "status=ok")) else []),
            ], query
        assert "Searched all rows." in await view(local, batch["id"], "text=nothing")


@pytest.mark.parametrize("form", ["plain", "gzip", "array"])
async def test_requests_are_next_to_their_rows(tmp_path: Path, form: str) -> None:
    """They are read from the input in each of its formats, until it is deleted."""
    data = lines_of([reply(f"{number}") for number in range(3)]).replace(b"\n", b"\n\n")
    numbers = [1, 3, 5]
    if form == "gzip":
        data = gzip.compress(data)
    elif form == "array":
        data, numbers = b"[" + b",".join(data.split(b"\n\n")[:-1]) + b"]", [1, 2, 3]
        data = json.dumps(json.loads(data)).encode()
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(data))["id"])
        wanted = f"lines={','.join(map(str, numbers))},x,99"
        found = await view(local, batch["id"], wanted, "requests")
        assert re.findall(r'data-line="(\d+)"', found) == [*map(str, numbers), "99"]
        for text in ("s0", "s1", "s2"):
            assert f">{text}<" in found
        one = await view(local, batch["id"], f"line={numbers[1]}")
        assert "Request as curl" in one
        assert "c1" in one
        await local.client.delete(f"/v1/files/{batch['input_file_id']}")
        assert "no longer available" in await view(local, batch["id"], wanted, "requests")


async def test_the_index_of_lines_is_made_by_the_validation(
    tmp_path: Path,
) -> None:
    """The first view reads a block of a file of several; a batch without the index reads it all."""
    num_lines, padding = 600, " " * 20_000
    lines = [json.loads(line) for line in lines_of([reply("x")]).splitlines() * num_lines]
    data = b"".join(
        json.dumps({**line, "custom_id": f"c{number}", "x": padding}).encode() + b"\n\n"
        for number, line in enumerate(lines)
    )
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(data))["id"])
        stored = local.store.batches.get(batch["id"])
        assert stored is not None
        figures, last = Figures(local.store), 2 * num_lines - 1
        with figures.counted():
            found = local.store.input_lines.read(stored, [1, last - 200, last])
        assert figures.num_bytes < 7 * 2**20 < len(data)
        assert [json.loads(line)["custom_id"] for line in found.values()] == [
            *("c0", f"c{num_lines - 101}", f"c{num_lines - 1}")
        ]
        with local.store.database.writing() as connection:
            connection.execute("DELETE FROM line_blocks")
        assert local.store.input_lines.read(stored, [1, last - 200, last]) == found


async def test_a_long_request_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note replaces it."""
    monkeypatch.setattr(input_lines, "READ_BYTES", 300)
    async with serving(tmp_path) as local:
        bodies = [{}, reply("long" * 100)]
        batch = await local.ended((await local.submit(lines_of(bodies)))["id"])
        found = await view(local, batch["id"], "lines=1,2", "requests")
        assert "s0" in found
        assert found.count("too long to be read") == 1


async def test_a_large_answer_has_its_own_page(tmp_path: Path) -> None:
    """A list does not read it; its page shows the beginning."""
    async with serving(tmp_path) as local:
        bodies = [reply("x" * 5_000_000), reply("small")]
        batch = await local.ended((await local.submit(lines_of(bodies)))["id"])
        listed = await view(local, batch["id"])
        assert "too large for the page" in listed
        assert len(listed) < 20_000
        one = await view(local, batch["id"], "line=1")
        assert "4,600,000 more characters" in one
        assert len(one) < 1_000_000


async def test_rows_are_downloaded_as_a_table(tmp_path: Path) -> None:
    """The rows of a search are a piece; deleted ones and other parameters are refused."""
    async with serving(tmp_path) as local:
        batch = await local.ended((await local.submit(lines_of(BODIES)))["id"])
        path = f"/dashboard/view/batches/{batch['id']}/export"
        found = await local.client.get(path, params={"format": "csv", "status": "failed"})
        about, _, text = found.content.partition(b"\n")
        assert json.loads(about) == {"rows": 1, "after": None, "columns": '[""]', "about": 0}
        [header, row] = csv.reader(text.decode("utf-8-sig").splitlines())
        assert dict(zip(header, row, strict=True))["line"] == "3"
        refused = await local.client.get(path, params={"format": "x"})
        assert (refused.status_code, "choose csv or parquet" in refused.text) == (400, True)
        for name in ("output_file_id", "error_file_id"):
            await local.client.delete(f"/v1/files/{batch[name]}")
        gone = await local.client.get(path, params={"format": "csv", "status": "all"})
        assert (gone.status_code, "can no longer be listed" in gone.text) == (410, True)


class SurrogateEngine(ScriptedEngine):
    """Puts an unpaired surrogate in place of a word of its reply."""

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Follow the script in the body."""
        found = await super().respond(url, body, request_id, created)
        text = json.dumps(found.body).replace("SURROGATE", "\\ud800")
        return Reply(found.status_code, json.loads(text), found.usage)


async def test_hostile_rows_do_no_harm(tmp_path: Path) -> None:
    """A row that is not text fails alone; texts of others are neither markup nor invisible."""
    hostile = f"{HOSTILE}\0\u2028"
    ids = ["\ud800", hostile, f"c{HOSTILE}", "d", "e" * 3000]
    replies = [reply("x"), reply(hostile), reply("SURROGATE"), {"reply": {"SURROGATE": 1}}]
    lines = map(json.loads, lines_of([*replies, reply(hostile)]).splitlines())
    data = "\n".join(
        json.dumps({**line, "custom_id": custom_id})
        for line, custom_id in zip(lines, ids, strict=True)
    )
    async with serving(tmp_path, SurrogateEngine()) as local:
        made = await local.submit(data.encode(), on_invalid_line="skip")
        batch = await local.ended(made["id"])
        assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
        assert await lines_found(local, batch["id"], "status=failed") == [1, 3, 4]
        assert "surrogate (d800 to dfff)" in await view(local, batch["id"], "line=1")
        assert r"\u0000\u2028" in await view(local, batch["id"], "line=2")
        assert "surrogates not allowed" in await view(local, batch["id"], "line=3")
        for name in ("first-rows", "errors"):
            await view(local, batch["id"], name=name)
        await view(local, batch["id"], "lines=1,2,3,4,5", "requests")
        assert await lines_found(local, batch["id"], "text=%ED%A0%80") == []
        path, fields = f"/dashboard/view/batches/{batch['id']}/export", {"status": "all"}
        found = await local.client.get(path, params={"format": "csv", **fields})
        rows = [*csv.reader(io.StringIO(found.text.partition("\n")[2], newline=""))]
        assert [row[1] for row in rows[1:]] == ["", hostile.replace("\0", "\ufffd"), *ids[2:]]


async def test_merged_rows_are_those_of_the_retry(tmp_path: Path) -> None:
    """Rows of both retries are in their places, in lists and in searches, also after a restart."""
    bodies = [{}, {"status": 500}, {"status": 400}, {**reply("y"), "status": 500}, {"status": 500}]
    async with serving(tmp_path) as local:
        old = await local.ended((await local.submit(lines_of(bodies)))["id"])
        await retried(local, old["id"], body={"status": 503})
        await retried(local, old["id"], body={"status": None, **reply("merged", "length")})
    async with serving(tmp_path) as local:
        assert await lines_found(local, old["id"], "status=all") == [1, 2, 3, 4, 5]
        assert await lines_found(local, old["id"], "status=failed") == [3]
        assert await lines_found(local, old["id"], "status=truncated") == [2, 4, 5]
        assert await lines_found(local, old["id"], "text=merged") == [2, 4, 5]
        await local.client.delete(f"/v1/files/{old['output_file_id']}")
        assert await lines_found(local, old["id"], "text=merged") == [2, 4, 5]
        now = await local.batch(old["id"])
        await local.client.delete(f"/v1/files/{now['output_file_id']}")
        assert "can no longer be listed" in await view(local, old["id"], "status=all")


async def test_tables_of_the_version_before_are_upgraded(tmp_path: Path) -> None:
    """Rows of unknown kind are read to know it; positions before a merge are deleted."""
    async with serving(tmp_path) as local:
        kept, merged, unmerged = [
            await local.ended((await local.submit(lines_of(BODIES)))["id"]) for _ in range(3)
        ]
        await retried(local, merged["id"], include_invalid=True, body={"status": None})
        local.store.batches.change(unmerged["id"], retried_by="batch_x")
    with closing(sqlite3.connect(tmp_path / "tidemill.sqlite3")) as connection, connection:
        for statement in (
            *(f"DROP INDEX rows_of_kind_{kind}" for kind in (1, 2, 3)),
            "UPDATE rows SET kind = kind <> 2",
            "ALTER TABLE rows RENAME COLUMN kind TO is_success",
            "PRAGMA user_version = 1",
        ):
            connection.execute(statement)
    async with serving(tmp_path) as local:
        for query, lines in QUERIES:
            assert await lines_found(local, kept["id"], query) == lines, query
        assert "can no longer be listed" in await view(local, merged["id"])
        assert await lines_found(local, unmerged["id"], "status=all") == [1, 2, 3, 4]
        await retried(local, kept["id"], include_invalid=True, body={"status": None})
        assert await lines_found(local, kept["id"], "status=ok") == [1, 2, 3]


def test_a_page_of_a_large_batch_reads_only_its_own_rows(tmp_path: Path) -> None:
    """Neither rows before it are read, nor positions of rows with another status."""
    num_rows = 30_000
    with open_store(tmp_path) as store:
        batch = fill(store, num_rows)
        figures = Figures(store)
        for query, most_rows in (
            (RowQuery(status="failed"), 11),
            (RowQuery(status="truncated"), 11),
            (RowQuery(after=num_rows // 2), 11),
            (RowQuery(status="failed", after=num_rows // 2), 11),
            (RowQuery(line=num_rows // 2), 1),
        ):
            with figures.counted():
                found = store.results.search(batch, query, 10)
            assert len(found.rows) == min(10, most_rows)
            assert figures.num_rows == most_rows
            assert figures.num_bytes < 10_000
            assert figures.num_steps < 600, query
        stored = store.batches.get(batch.id)
        assert stored is not None
        lines = range(num_rows // 2, num_rows // 2 + 25)
        store.input_lines.read(stored, lines)
        with figures.counted():
            assert len(store.input_lines.read(stored, lines)) == 25
        assert figures.num_bytes <= 3 * 2**20


def test_a_search_stops_after_a_limit(tmp_path: Path) -> None:
    """The next one continues there and reads no row again."""
    with open_store(tmp_path) as store:
        batch = fill(store, 1000)
        figures = Figures(store)
        query, num_steps = RowQuery(text="nothing"), 0
        with figures.counted():
            while (found := store.results.search(batch, query, 25, 100_000)).next_after is not None:
                query, num_steps = RowQuery(text="nothing", after=found.next_after), num_steps + 1
        assert num_steps > 3
        assert figures.num_rows == 1000
        assert found.through == 1000
