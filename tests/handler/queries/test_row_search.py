"""Searches for rows, and the requests of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic_core import to_json

from tests.handler.finalize.rig import Cloud, Drop, fail
from tidemill.batch import parts
from tidemill.batch.object_keys import seal_key
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import SEARCHED_BYTES, StoredRows
from tidemill.handler.aws.calls import Call
from tidemill.handler.queries import row_requests, row_search
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.row_requests import read_requests
from tidemill.handler.queries.row_search import search_rows


def row_of(line: int) -> FinishedRow:
    """Return a row: every fourth fails, and of the others every third is truncated."""
    is_success = line % 4 != 0
    choice = {
        "message": {"content": f"answer {line}"},
        "finish_reason": "length" if line % 3 == 0 else "stop",
    }
    body = {"choices": [choice]} if is_success else {"error": {"code": "bad", "message": "No."}}
    response = {"status_code": 200 if is_success else 400, "request_id": "r", "body": body}
    row = {"id": "x", "custom_id": f"c{line}", "response": response, "error": None}
    return FinishedRow(line, to_json(row) + b"\n", is_success)


def run(drop: Drop, number: int, *, is_sealed: bool = True) -> None:
    """Run a shard, and seal it or not."""
    shard = drop.claim(number, lease_seconds=60)
    lines = range(shard.first_line, shard.first_line + shard.num_rows)
    bucket = drop.cloud.deployment.bucket
    drop.cloud.run(bucket.put_part(shard, 0, encode_part(map(row_of, lines))))
    if not is_sealed:
        return
    index = drop.cloud.run(bucket.index_parts(drop.id, number, left_out=fail))
    seal = index.seal()
    drop.cloud.run(bucket.put_segments(shard, seal))
    drop.cloud.run(
        drop.cloud.deployment.table.commit(
            shard,
            progress=index.progress(),
            output_sizes=[segment.num_bytes for segment in seal.output],
            error_sizes=[segment.num_bytes for segment in seal.errors],
        )
    )


@pytest.fixture
def drop(mini: Cloud) -> Drop:
    """Return a batch with sealed shards, a running one, and one that waits."""
    drop = mini.drop(16).begin()
    run(drop, 0)
    run(drop, 1)
    run(drop, 2, is_sealed=False)
    return drop


def search(
    drop: Drop,
    limit: int = 100,
    cache: PartCache | None = None,
    max_bytes: int = SEARCHED_BYTES,
    **query: Any,
) -> StoredRows:
    """Return the rows that match."""
    cloud = drop.cloud
    return search_rows(
        cloud.aws,
        cloud.deployment,
        drop.batch,
        cache or PartCache(),
        RowQuery(**query),
        limit=limit,
        max_bytes=max_bytes,
    )


def lines_of(found: StoredRows) -> list[int]:
    """Return the lines of rows, each of which must be the row of its line."""
    assert all(row == row_of(line).row for line, row in found.rows)
    return [line for line, _ in found.rows]


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        ({}, list(range(1, 13))),
        ({"status": "failed"}, [4, 8, 12]),
        ({"status": "truncated"}, [3, 6, 9]),
        ({"status": "ok"}, [1, 2, 5, 7, 10, 11]),
        ({"code": "bad", "after": 4}, [8, 12]),
        ({"code": "400", "status": "ok"}, []),
        ({"reason": "length"}, [3, 6, 9]),
        ({"text": "ANSWER 1"}, [1, 10, 11]),
        ({"id": "c11"}, [11]),
        ({"min_chars": 9}, [10, 11]),
        ({"max_chars": 3}, [4, 8, 12]),
        ({"max_confidence": 0.5}, []),
        ({"line": 6}, [6]),
        ({"line": 14}, []),
    ],
)
def test_rows_that_match_are_found(drop: Drop, query: dict[str, Any], lines: list[int]) -> None:
    """Each condition holds for sealed and for running shards."""
    found = search(drop, **query)
    assert lines_of(found) == lines
    assert found.next_after is None


@pytest.mark.parametrize("query", [{}, {"status": "failed"}, {"text": "answer"}])
def test_pages_follow_each_other(drop: Drop, query: dict[str, Any]) -> None:
    """No row is repeated or left out, and no page is empty."""
    whole, paged, after, cache = lines_of(search(drop, **query)), [], 0, PartCache()
    while True:
        page = search(drop, 2, cache, after=after, **query)
        assert page.rows
        paged += lines_of(page)
        if page.next_after is None:
            break
        after = page.next_after
    assert paged == whole


def test_a_search_stops_at_its_limit_and_continues(
    drop: Drop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how far it has come."""
    monkeypatch.setattr(row_search, "_FIRST_CHUNK", 1)
    found = search(drop, text="answer 11", max_bytes=1)
    assert found == StoredRows([], 1, 1)
    num_calls, after = 1, 1
    while found.next_after is not None:
        found = search(drop, text="answer 11", after=after, max_bytes=1)
        after, num_calls = found.next_after or 0, num_calls + 1
        if found.rows:
            break
    assert (lines_of(found), num_calls) == ([11], 11)
    monkeypatch.setattr(row_search, "FOUND_BYTES", 1)
    found = search(drop, text="answer", max_bytes=2**20)
    assert (len(found.rows), found.next_after) == (1, 1)


def test_failed_and_truncated_rows_need_no_other_row(
    drop: Drop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their bytes are read, besides the indexes."""
    ranges: list[str] = []
    send = drop.cloud.aws._send

    def noted(call: Call) -> Any:
        if call.method == "get_object" and "Range" in call.arguments:
            ranges.append(call.arguments["Key"])
        return send(call)

    cache = PartCache()
    search(drop, cache=cache)
    monkeypatch.setattr(drop.cloud.aws, "_send", noted)
    search(drop, cache=cache, status="failed")
    search(drop, cache=cache, status="truncated")
    assert len(ranges) == 6


def test_truncated_rows_of_an_older_index_are_read(
    drop: Drop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not tell them apart."""
    shard = drop.shard(0)
    bucket = drop.cloud.deployment.bucket
    seal = drop.cloud.run(bucket.read_seal(shard))
    older = seal.model_dump(mode="json", exclude={"truncated"})
    key = seal_key(drop.id, 0, shard.fence)
    drop.cloud.run(bucket.put(key, to_json(older), "application/json"))
    monkeypatch.setattr(parts, "SEGMENT_BYTES", 1)
    assert lines_of(search(drop, status="truncated")) == [3, 6, 9]
    assert lines_of(search(drop, status="ok"))[:2] == [1, 2]


def test_requests_are_the_lines_of_the_input(drop: Drop) -> None:
    """A second call reads only the lines themselves."""
    cache, lines = PartCache(), [1, 4, 16]
    for _ in range(2):
        found = read_requests(drop.cloud.aws, drop.cloud.deployment, drop.batch, cache, lines)
        assert found == {line: drop.lines[line - 1] for line in lines}


def test_requests_are_read_up_to_a_limit(drop: Drop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are missing."""
    shard = drop.shard(0)
    monkeypatch.setattr(row_requests, "READ_BYTES", shard.end - shard.start)
    args = (drop.cloud.aws, drop.cloud.deployment)
    assert list(read_requests(*args, drop.batch, PartCache(), [2, 5])) == [2]
    assert read_requests(*args, replace(drop.batch, num_shards=0), PartCache(), [2]) == {}
