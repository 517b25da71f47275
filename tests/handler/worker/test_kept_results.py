"""Batches that reuse what earlier ones of their tenant have computed, and what may go wrong."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.emulators import MODEL
from tests.handler.worker.fakes import FakeEngine, FaultyAws, QuickAws
from tests.handler.worker.rig import Rig, Work, until
from tidemill.handler.aws.calls import Call
from tidemill.handler.errors import AwsError


def greedy(name: str, **body: Any) -> bytes:
    """Return a line whose answer is determined, unless `body` says otherwise."""
    request = {"custom_id": name, "temperature": 0, "messages": []} | body
    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": request}
    return json.dumps(line).encode() + b"\n"


async def finished(rig: Rig, work: Work, **changes: Any) -> int:
    """Let a worker run a batch; return how many lines its engine received."""
    engine = FakeEngine()
    async with rig.worker(engine=engine, **{"reuse": True, **changes}):
        await until(lambda: work.is_done)
    return len(engine.requests)


def packs(rig: Rig) -> list[str]:
    """Return the keys of all packs."""
    found: list[str] = rig.run(rig.deployment.bucket.list_keys("results/"))
    return found


async def test_a_second_batch_computes_what_changed(rig: Rig) -> None:
    """Rows are those that it would have computed, in order, and their lines cost no token."""
    first = rig.batch(*(greedy(f"c{n}") for n in range(12)), shard_lines=5)
    assert await finished(rig, first) == 12
    names = [f"c{n}" for n in range(12)]
    names[3], names[9] = "new", "other"
    second, third = (rig.batch(*map(greedy, names), shard_lines=7, rings=False) for _ in range(2))
    second.ring()
    assert await finished(rig, second) == 2
    third.ring()
    assert await finished(rig, third, reuse=False) == 12
    assert second.ids() == names
    ours, theirs = (
        [row["response"]["body"] | {"created": 0} for row in work.sealed()]
        for work in (second, third)
    )
    assert ours == theirs
    assert {row["response"]["body"]["created"] for row in second.sealed()} == {
        second.batch.created_at
    }
    progress = [second.shard(number).progress for number in range(2)]
    assert [each.reused for each in progress] == [6, 4]
    assert [each.prompt_tokens for each in progress] == [10, 10]
    assert sum(each.completed for each in progress) == 12


async def test_echoed_fields_are_not_part_of_a_result(rig: Rig) -> None:
    """Rows have the fields that their own batch echoes: computed, reused and failed ones."""
    lines = [greedy("a"), greedy("b", status=400), b'{"custom_id": "c", "url": 5}\n']
    first, second = (
        rig.batch(*lines, rings=False, echo_fields=names) for names in (("url",), ("method", "url"))
    )
    for work in (first, second):
        work.ring()
        await finished(rig, work)
    assert second.shard().progress.reused == 1
    good, *failed = (second.sealed()[0], *second.sealed("errors"))
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    own = [
        {name: row[name] for name in row if name in {"method", "url"}} for row in (good, *failed)
    ]
    assert own == [chat, chat, {"url": 5}]
    [kept] = first.sealed()
    assert (kept["url"], "method" in kept) == ("/v1/chat/completions", False)
    created = {"created": 0}
    assert kept["response"]["body"] | created == good["response"]["body"] | created


async def test_truncated_answers_are_counted_where_they_are_reused_too(rig: Rig) -> None:
    """A shard's commit adds them to the batch, whose live shards had them before."""
    lines = [
        greedy(f"c{number}", choices=[{"finish_reason": reason}])
        for number, reason in enumerate(["stop", "length", "length", "stop", "length"])
    ]
    first = rig.batch(*lines, greedy("c5", status=400), shard_lines=2)
    assert await finished(rig, first) == 6
    second = rig.batch(*lines, shard_lines=5)
    assert await finished(rig, second) == 0
    for work, counts in ((first, (5, 1, 0)), (second, (5, 0, 5))):
        table = rig.deployment.table
        progress = rig.run(table.get_shard_progress(work.batch)).progress(time.time())
        assert (progress.completed, progress.failed, progress.reused) == counts
        assert progress.truncated == 3
    assert [first.shard(number).progress.truncated for number in range(3)] == [1, 1, 1]


async def test_results_are_of_one_tenant_one_model_and_what_is_determined(rig: Rig) -> None:
    """Lines of another tenant or digest are computed; sampled ones are reused on request."""
    lines = [greedy("a"), greedy("b", seed=7, temperature=1), greedy("c", temperature=1)]
    lines += [greedy("d", status=400)]
    assert await finished(rig, rig.batch(*lines)) == 4
    assert await finished(rig, rig.batch(*lines)) == 2
    assert await finished(rig, rig.batch(*lines, tenant="another")) == 4
    assert await finished(rig, rig.batch(*lines), reuse_sampled=True) == 2
    assert await finished(rig, rig.batch(*lines), reuse_sampled=True) == 1
    rig.results_digest = b"another"
    assert await finished(rig, rig.batch(*lines)) == 4
    rig.results_digest = None
    assert await finished(rig, rig.batch(*lines)) == 4


async def test_lines_with_and_without_the_model_share_results(rig: Rig) -> None:
    """The model is filled in as the one that is served; equal lines are answered alike."""
    assert await finished(rig, rig.batch(greedy("a"), greedy("b", model=MODEL))) == 2
    assert await finished(rig, rig.batch(greedy("c", custom_id="a", model=MODEL))) == 0
    assert await finished(rig, rig.batch(greedy("c", custom_id="b"))) == 0


async def test_equal_sampled_lines_keep_their_own_results(rig: Rig) -> None:
    """They do so across shards and batches, wherever their shards begin."""
    line = greedy("a", temperature=1)
    first = rig.batch(*[line] * 6, shard_lines=2)
    assert await finished(rig, first, reuse_sampled=True) == 6
    second = rig.batch(*[line] * 7, shard_lines=4)
    assert await finished(rig, second, reuse_sampled=True) == 1
    assert [row["id"] for row in first.sealed()] == [row["id"] for row in second.sealed()][:6]
    assert len({row["response"]["body"]["id"] for row in second.sealed()}) == 7


async def test_no_results_are_stored_unless_enabled(rig: Rig) -> None:
    """By default the bucket contains rows, and no copies of them."""
    assert await finished(rig, rig.batch(greedy("a")), reuse=False) == 1
    assert packs(rig) == []


@pytest.mark.parametrize("spoiled", ["torn", "foreign", "gone"])
async def test_a_pack_that_is_not_as_it_was_costs_its_results(rig: Rig, spoiled: str) -> None:
    """Its lines are computed, and the other pack's reused."""
    first = rig.batch(*(greedy(f"c{n}") for n in range(4)), shard_lines=2)
    assert await finished(rig, first) == 4
    key, _ = packs(rig)
    bucket = rig.deployment.bucket
    data = rig.run(bucket.get(key))
    if spoiled == "gone":
        rig.run(bucket.delete(key))
    else:
        rig.run(bucket.put(key, data[:70] if spoiled == "torn" else b"x" * len(data)))
    rig.run(bucket.put("results/owner/what is this", b"{}"))
    second = rig.batch(*(greedy(f"c{n}") for n in range(4)))
    assert await finished(rig, second) == 2
    assert second.ids() == ["c0", "c1", "c2", "c3"]


@pytest.mark.parametrize("method", ["list_objects_v2", "get_object", "put_object"])
async def test_a_store_that_cannot_be_used_costs_no_line(rig: Rig, method: str) -> None:
    """No line fails, neither by a lookup nor by a write."""
    await finished(rig, rig.batch(greedy("a")))

    def refuses(call: Call) -> Exception | None:
        where = str(call.arguments.get("Prefix", call.arguments.get("Key", "")))
        is_ours = call.method == method and where.startswith("results/")
        return AwsError("access denied", aws_code="AccessDenied") if is_ours else None

    work = rig.batch(greedy("a"), greedy("b"))
    async with QuickAws() as aws:
        num_requests = await finished(rig, work, aws=FaultyAws(aws, refuses))
    assert work.ids() == ["a", "b"]
    assert num_requests == (1 if method == "put_object" else 2)


async def test_a_part_that_cannot_be_read_again_costs_its_results_alone(rig: Rig) -> None:
    """The shard is committed; so it is if the results' digest is unknown."""

    def refuses(call: Call) -> Exception | None:
        is_part = call.method == "get_object" and "/part-" in call.arguments["Key"]
        return AwsError("access denied") if is_part and "Range" not in call.arguments else None

    work = rig.batch(greedy("a"))
    async with QuickAws() as aws:
        assert await finished(rig, work, aws=FaultyAws(aws, refuses)) == 1
    assert (work.ids(), packs(rig)) == (["a"], [])
    rig.results_digest = OSError("no such file")
    again = rig.batch(greedy("a"))
    assert await finished(rig, again) == 1
    assert (again.ids(), packs(rig)) == (["a"], [])


async def test_what_is_kept_is_bounded(rig: Rig) -> None:
    """The oldest packs go, and nothing that is none."""
    rig.run(rig.deployment.bucket.put("results/owner/model/00ff/notes.1", b"y" * 30_000))
    for number in range(4):
        work = rig.batch(greedy(f"c{number}", text="x" * 10_000))
        await finished(rig, work, reuse_max_size=25_000)
        made_at = int(time.time())  # S3 knows whole seconds
        await until(lambda made_at=made_at: int(time.time()) > made_at)
    assert len(packs(rig)) == 2 + 1
    assert await finished(rig, rig.batch(greedy("c3", text="x" * 10_000))) == 0
    assert await finished(rig, rig.batch(greedy("c0", text="x" * 10_000))) == 1
