"""Finished rows by their lines: which are given, in which order, and how far they are whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from pydantic_core import from_json

from tests.handler.finalize.rig import Cloud, Drop, row_of
from tidemill.batch.model import Options, Shard
from tidemill.batch.object_keys import part_key, seal_key, shard_prefix
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Call
from tidemill.handler.lifecycle.finish import end_batch
from tidemill.handler.queries import results as read
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.results import Results, read_results
from tidemill.handler.queries.row_finder import NotIndexed, RowFinder, WorkGone


def results_of(
    drop: Drop, after_line: int = 0, limit: int = 100, cache: PartCache | None = None
) -> Results:
    """Return a reply, from a process with an empty cache by default."""
    return read_results(
        drop.cloud.aws,
        drop.cloud.deployment,
        drop.batch,
        cache or PartCache(),
        after_line=after_line,
        limit=limit,
    )


def lines_in(found: Results) -> list[int]:
    """Return the lines of an answer; each row has to be that of its line."""
    for line, row in found.rows:
        assert row == row_of(line).row
    return [line for line, _ in found.rows]


def calls_to(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Return the calls that are made from now on."""
    calls: list[Call] = []
    send = cloud.aws._send

    def note(call: Call) -> Any:
        calls.append(call)
        return send(call)

    monkeypatch.setattr(cloud.aws, "_send", note)
    return calls


def test_rows_are_there_as_soon_as_they_are_durable(cloud: Cloud) -> None:
    """They come in line order, over parts and shards, before the table records them."""
    drop = cloud.drop(10).begin()
    first, last = drop.claim(0, lease_seconds=60), drop.claim(2, lease_seconds=60)
    assert lines_in(results_of(drop)) == []
    drop.put_rows(first, [3, 1])
    assert drop.shard(0).progress.num_rows == 0
    drop.put_rows(last, [10])
    drop.put_rows(first, [2], number=1)
    found = results_of(drop)
    assert lines_in(found) == [1, 2, 3, 10]
    assert (found.complete_through, found.has_more) == (3, False)


def test_who_goes_on_from_where_all_is_complete_misses_nothing(cloud: Cloud) -> None:
    """Rows behind a gap are given, and given again once the gap is filled."""
    drop = cloud.drop(8).begin()
    shard = drop.claim(0, lease_seconds=60)
    drop.put_rows(shard, [1, 3])
    found = results_of(drop)
    assert (lines_in(found), found.complete_through) == ([1, 3], 1)
    drop.put_rows(shard, [2, 4], number=1)
    found = results_of(drop, after_line=found.complete_through)
    assert (lines_in(found), found.complete_through) == ([2, 3, 4], 4)
    drop.run_shard(1)
    found = results_of(drop, after_line=found.complete_through)
    assert (lines_in(found), found.complete_through) == ([5, 6, 7, 8], 8)
    assert results_of(drop, after_line=8) == Results([], 8, has_more=False)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 13, 14])
def test_pages_follow_each_other_to_the_end(mini: Cloud, limit: int) -> None:
    """Each row once, no page empty, over sealed and open shards, and each says how far it goes."""
    drop = mini.drop(13).begin()
    for number in (0, 1, 3):
        drop.run_shard(number)
    shard = drop.claim(2, lease_seconds=60)
    drop.put_rows(shard, [9, 10, 11])
    cache, after, lines, num_pages = PartCache(), 0, [], 0
    while True:
        page = results_of(drop, after, limit, cache)
        lines += lines_in(page)
        num_pages += 1
        assert page.complete_through == min(page.rows[-1][0], 11)
        if not page.has_more:
            break
        assert len(page.rows) == limit
        after = page.rows[-1][0]
    assert lines == [*range(1, 12), 13]
    assert num_pages == -(-12 // limit)


def test_of_many_shards_those_are_read_that_an_answer_needs(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any start gives the same rows, and neither earlier nor much later shards are read."""
    drop = mini.drop(78).begin()
    for number in range(0, 20, 2):
        drop.run_shard(number)
    drop.put_rows(drop.claim(7, lease_seconds=60), [29, 31])
    cache = PartCache()
    after = [*range(0, 79, 13), 28, 31]
    whole = {line: results_of(drop, line, cache=cache) for line in after}
    monkeypatch.setattr(read, "_NUM_READ_AT_ONCE", 3)
    assert {line: results_of(drop, line, cache=cache) for line in after} == whole
    assert lines_in(whole[28]) == [29, 31, *lines_in(whole[31])]
    calls = calls_to(mini, monkeypatch)
    assert lines_in(results_of(drop, 64, 4, cache)) == [65, 66, 67, 68]
    made = Counter(call.method for call in calls if call.service == "dynamodb")
    assert made["query"] <= 6  # shards and what is live of them; singly, too
    assert made["get_item"] <= 16  # two rounds of concurrent ones


def come_late(drop: Drop, older: Shard) -> None:
    """Write, as an owner that has lost its lease, a row of a line that the next one has run too."""
    late = FinishedRow(2, b'{"custom_id":"late"}\n', is_success=True)
    key = part_key(drop.id, older.number, older.fence, 5)
    drop.cloud.run(drop.cloud.deployment.bucket.put(key, encode_part([late])))


def test_each_line_has_one_row_despite_two_owners(cloud: Cloud) -> None:
    """Rows of the present owner count, and it does not read later ones."""
    drop = cloud.drop(4).begin()
    older = drop.claim(0)
    drop.put_rows(drop.claim(0), [2, 3])
    come_late(drop, older)
    assert lines_in(results_of(drop)) == [2, 3]


def test_rows_of_a_sealed_shard_are_those_of_its_commit(cloud: Cloud) -> None:
    """Additional parts do not matter: the output has the same rows."""
    drop, cache = cloud.drop(3).begin(), PartCache()
    older = drop.claim(0)
    drop.run_shard(0)
    come_late(drop, older)
    found = results_of(drop, cache=cache)
    assert (lines_in(found), found.complete_through) == ([1, 2, 3], 3)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    assert results_of(drop, cache=cache).rows == found.rows
    assert cloud.read(drop.batch.outputs.output_key) == b"".join(
        row or b"" for _, row in found.rows
    )


def test_an_ended_batch_gives_all_its_rows(cloud: Cloud) -> None:
    """Rows of lines that never ran are included; blank lines and lost rows do not stop paging."""
    drop = cloud.drop(10, options=Options()).begin()
    shard = drop.claim(0)
    drop.put_rows(shard, [2])
    drop.run_shard(1)
    drop.move(Status.FINALIZING, ago_seconds=60, outcome="expired").finish()
    found = results_of(drop)
    assert [line for line, _ in found.rows] == list(range(1, 11))
    assert (found.complete_through, found.has_more) == (10, False)
    codes = [(from_json(row or b"").get("error") or {}).get("code") for _, row in found.rows]
    assert codes == ["batch_expired", None, *["batch_expired"] * 2, *[None] * 4, *codes[8:]]
    assert set(codes[8:]) == {"batch_expired"}


def test_a_cancelled_batch_gives_what_was_finished(cloud: Cloud) -> None:
    """The others have no row and never will: a follower is at the end."""
    drop = cloud.drop(10).begin()
    drop.put_rows(drop.claim(1), [6])
    drop.move(Status.CANCELLING, ago_seconds=60).finish()
    found = results_of(drop)
    assert (lines_in(found), found.complete_through, found.has_more) == ([6], 10, False)


def test_a_batch_without_shards_has_no_rows(mini: Cloud) -> None:
    """It has none while it is validated, nor after a refusal."""
    drop = mini.drop(4)
    assert results_of(drop, 3) == Results([], 3, has_more=False)
    end_batch(mini.aws, mini.deployment, drop.id, Status.FAILED, 9)
    assert results_of(drop) == Results([], 0, has_more=False)


@pytest.mark.parametrize("spoil", ["seal", "cache"])
def test_deleted_work_is_reported(cloud: Cloud, spoil: str) -> None:
    """It does not matter whether its parts are cached."""
    drop, cache = cloud.drop(8).begin(), PartCache()
    for number in (0, 1):
        drop.run_shard(number)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    if spoil == "cache":
        assert len(results_of(drop, cache=cache).rows) == 8
    bucket = cloud.deployment.bucket
    for key in cloud.run(bucket.list_keys(shard_prefix(drop.id, 1))):
        cloud.run(bucket.delete(key))
    assert lines_in(results_of(drop, limit=3, cache=cache)) == [1, 2, 3]
    with pytest.raises(WorkGone):
        results_of(drop, after_line=2, cache=cache)


def test_heads_and_wanted_rows_are_all_that_is_read(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are read; each part's header, and each seal's index, is read once per process."""
    drop, cache = cloud.drop(8).begin(), PartCache()
    drop.run_shard(0, size=100_000)
    shard = drop.claim(1, lease_seconds=60)
    drop.put_rows(shard, [5, 6], size=100_000)
    calls = calls_to(cloud, monkeypatch)
    (_, row), *_ = results_of(drop, after_line=1, limit=1, cache=cache).rows
    assert row == row_of(2, 100_000).row
    seal, rows = [call.arguments for call in calls if call.method == "get_object"]
    assert seal["Key"] == seal_key(drop.id, 0, 1)
    start, end = map(int, rows["Range"].removeprefix("bytes=").split("-"))
    assert end - start + 1 == len(row)
    calls.clear()
    assert len(results_of(drop, cache=cache).rows) == 6
    heads = [call for call in calls if call.arguments.get("Range") == "bytes=0-16383"]
    assert len(heads) == 1
    calls.clear()
    assert len(results_of(drop, cache=cache).rows) == 6
    assert [call.method for call in calls].count("list_objects_v2") == 1
    keys = {call.arguments["Key"] for call in calls if call.method == "get_object"}
    assert seal_key(drop.id, 0, 1) not in keys
    assert [call for call in calls if call.arguments.get("Range") == "bytes=0-16383"] == []


def test_a_long_head_takes_more_looks(mini: Cloud) -> None:
    """A part of very many rows has one; a part whose rows are torn is left out."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0, lease_seconds=60)
    many = encode_part(FinishedRow(n, b"{}\n", is_success=True) for n in range(1, 20_000))
    bucket = mini.deployment.bucket
    mini.run(bucket.put(part_key(drop.id, 0, shard.fence, 0), many))
    for number, torn in enumerate((many[:-1], many[:50_000], b"x", b""), start=1):
        mini.run(bucket.put(part_key(drop.id, 0, shard.fence, number), torn))
    found = results_of(drop, after_line=9_990, limit=1000)
    assert [line for line, _ in found.rows] == list(range(9_991, 10_991))
    assert {row for _, row in found.rows} == {b"{}\n"}


def test_an_answer_has_a_size(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rows come with the next page; a single larger one is reported without its content."""
    monkeypatch.setattr(read, "MAX_BYTES", 2500)
    drop = mini.drop(8).begin()
    shard = drop.claim(0, lease_seconds=60)
    for number, (line, size) in enumerate(((1, 1000), (2, 1000), (3, 3000), (4, 1000))):
        drop.put_rows(shard, [line], size=size, number=number)
    page = results_of(drop)
    assert [(line, row is None) for line, row in page.rows] == [(1, False), (2, False), (3, True)]
    assert (page.complete_through, page.has_more) == (3, True)
    rest = results_of(drop, after_line=3)
    assert [line for line, _ in rest.rows] == [4]


def test_an_answer_reads_few_ranges(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are far apart come with the next page."""
    monkeypatch.setattr(read, "MAX_RANGES", 3)
    drop = mini.drop(8).begin()
    for shard_number in (0, 1):
        shard = drop.claim(shard_number, lease_seconds=60)
        first = shard.first_line
        drop.put_rows(shard, [first, first + 2])
        drop.put_rows(shard, [first + 1, first + 3], number=1)
    page = results_of(drop)
    assert (lines_in(page), page.has_more) == ([1, 2, 3, 4, 5], True)
    assert page.complete_through == 5


def test_too_many_parts_are_found_by_and_by(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request reads some heads and remembers them; what is known by then is given."""
    drop, cache = mini.drop(8).begin(), PartCache()
    drop.run_shard(0)
    shard = drop.claim(1, lease_seconds=60)
    for line in (5, 6, 7, 8):
        drop.put_rows(shard, [line], number=line)
    monkeypatch.setattr(read, "RowFinder", partial(RowFinder, heads_left=2))
    page = results_of(drop, cache=cache)
    assert (lines_in(page), page.complete_through, page.has_more) == ([1, 2, 3, 4], 4, True)
    with pytest.raises(NotIndexed):
        results_of(drop, after_line=4, cache=cache)
    assert lines_in(results_of(drop, after_line=4, cache=cache)) == [5, 6, 7, 8]


def test_blank_lines_hold_nothing_up(mini: Cloud) -> None:
    """They count among the lines and have no row: a shard with all its rows is whole."""
    drop = mini.drop(8).begin()
    table = mini.deployment.table
    for number, first_line in ((0, 3), (1, 20)):
        shard = replace(drop.shard(number), first_line=first_line)
        fields = {"first_line": shard.first_line}
        mini.run(table.update({"pk": f"BATCH#{drop.id}", "sk": f"SHARD#{number:07}"}, fields))
    first = drop.claim(0, lease_seconds=60)
    drop.put_rows(first, [3, 5, 9, 10])
    found = results_of(drop)
    assert (lines_in(found), found.complete_through) == ([3, 5, 9, 10], 19)
