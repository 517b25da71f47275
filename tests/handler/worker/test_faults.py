"""AWS fails, answers are lost, leases end: a worker repeats itself, or stops before it harms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.handler.worker.fakes import FaultyAws, QuickAws, is_claim, is_commit
from tests.handler.worker.rig import NEVER, PATIENCE_SECONDS, Rig, RunningWorker, until
from tidemill.batch.model import ShardStatus
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.calls import Call
from tidemill.handler.errors import AwsError
from tidemill.handler.worker import worker as worker_module
from tidemill.handler.worker.context import context as site_module

GOOD: dict[str, Any] = {}


def times(count: int, matches: Callable[[Call], bool]) -> Callable[[Call], Exception | None]:
    """Fail the first calls that match, up to that number."""
    left = [count]

    def refuse(call: Call) -> Exception | None:
        if left[0] and matches(call):
            left[0] -= 1
            return AwsError(f"{call.method}: injected")
        return None

    return refuse


def is_part(call: Call) -> bool:
    """Say whether a call writes a part."""
    return call.method == "put_object" and "/part-" in call.arguments["Key"]


def is_renewal(call: Call) -> bool:
    """Say whether a call renews a lease."""
    return call.arguments.get("UpdateExpression") == "SET #state = :set_state"


@asynccontextmanager
async def failing(
    rig: Rig,
    refuses: Callable[[Call], Exception | None],
    *,
    after: bool = False,
    **changes: Any,
) -> AsyncIterator[RunningWorker]:
    """Run a worker for which AWS fails."""
    async with QuickAws() as aws:
        faulty = FaultyAws(aws, refuses, after=after)
        async with rig.worker(aws=faulty, **changes) as running:
            yield running


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "RETRY_SECONDS", 0.05)


@pytest.mark.parametrize("after", [False, True])
async def test_a_part_that_failed_is_written_under_another_number(rig: Rig, *, after: bool) -> None:
    """It may have been written after all, and what was written is never changed."""
    work = rig.batch(*[GOOD] * 3)
    async with failing(rig, times(2, is_part), after=after):
        await until(lambda: work.is_done)
    numbers = [int(key.rpartition("-")[2]) for key in work.keys("part")]
    assert numbers == ([0, 1, 2] if after else [2])
    assert work.ids() == ["c1", "c2", "c3"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_commit_that_failed_is_sent_again(rig: Rig, *, after: bool) -> None:
    """If it had succeeded, the second finds its own work and the shard counts once."""
    work = rig.batch(GOOD)
    refuses = times(1, is_commit)
    async with failing(rig, refuses, after=after):
        await until(lambda: work.is_done and not rig.run(rig.queue.count()))
    assert work.num_left == 0
    assert rig.messages() == [{"kind": "advance", "batch_id": work.id}]


@pytest.mark.parametrize(
    "method", ["receive_message", "get_object", "list_objects_v2", "get_item", "delete_message"]
)
async def test_a_service_that_fails_for_a_while_is_called_again(rig: Rig, method: str) -> None:
    """Nothing is lost, whichever call failed."""
    work = rig.batch(GOOD, GOOD, shard_lines=1)
    async with failing(rig, times(2, lambda call: call.method == method), tick_seconds=0.2):
        await until(lambda: work.is_done)
    assert work.ids() == ["c1", "c2"]


@pytest.mark.parametrize("after", [False, True])
async def test_a_claim_that_failed_is_sent_again(rig: Rig, *, after: bool) -> None:
    """If it had succeeded, the second finds its own work."""
    work = rig.batch(GOOD)
    async with failing(rig, times(1, is_claim), after=after):
        await until(lambda: work.is_done)
    assert work.shard().fence == 1


async def test_renewals_that_fail_are_made_good_before_the_lease_ends(rig: Rig) -> None:
    """A heartbeat that fails is tried again at the next."""
    work = rig.batch({"wait": NEVER})
    num_renewals = 0

    def refuse(call: Call) -> Exception | None:
        nonlocal num_renewals
        num_renewals += is_renewal(call)
        return AwsError("injected") if is_renewal(call) and num_renewals <= 2 else None

    async with failing(rig, refuse, lease_seconds=9) as running:
        await until(lambda: work.shard().owner)
        claimed_until = work.shard().lease_until
        await until(lambda: work.shard().lease_until > claimed_until)
        assert num_renewals > 2
        await until(lambda: running.engine.inside == {"c1"})


async def test_a_shard_that_cannot_be_written_is_given_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given back after a while, with an attempt counted; its message comes again."""
    monkeypatch.setattr(site_module, "PATIENCE_SECONDS", 0.3)
    work = rig.batch(GOOD)
    async with failing(rig, times(1_000, is_part), visibility_seconds=30):
        await until(lambda: work.shard().fence and work.is_free)
    assert (work.shard().attempts, work.shard().status) == (1, ShardStatus.PENDING)
    assert rig.run(rig.queue.count()) == 1


async def test_a_lease_that_cannot_be_renewed_ends_all_writing(rig: Rig) -> None:
    """No other worker has taken the shard, but it could have."""
    work = rig.batch(GOOD, {"wait": NEVER})

    def refuse(call: Call) -> Exception | None:
        return AwsError("injected") if is_renewal(call) else None

    async with failing(
        rig, refuse, lease_seconds=6, flush_seconds=NEVER, visibility_seconds=60
    ) as running:
        await until(lambda: running.engine.requests)
        await until(lambda: not running.engine.inside)
    assert work.keys("part") == []
    assert work.shard().owner is not None
    assert rig.run(rig.queue.count()) == 1


async def test_a_shard_that_another_has_taken_is_dropped(rig: Rig) -> None:
    """No part, no segment, no release follows; the other's fence stays."""
    work = rig.batch(GOOD, {"wait": NEVER}, rings=False)
    work.ring()
    async with rig.worker(flush_seconds=NEVER, lease_seconds=6) as running:
        await until(lambda: running.engine.inside == {"c2"})
        taken = rig.run(
            rig.deployment.table.claim(
                work.id, 0, owner="finalizer", now=0, lease_seconds=60, steal=True
            )
        )
        await until(lambda: not running.engine.inside)
        await asyncio.sleep(0.5)
    assert work.keys("part") == []
    assert work.shard() == taken


async def test_a_late_commit_changes_nothing(rig: Rig) -> None:
    """A worker that was overtaken between its last look and its commit."""
    work = rig.batch(GOOD)
    stolen = []

    def steal(call: Call) -> Exception | None:
        if is_commit(call) and not stolen:
            table = rig.deployment.table
            stolen.append(
                rig.run(table.claim(work.id, 0, owner="x", now=0, lease_seconds=60, steal=True))
            )
        return None

    async with failing(rig, steal, visibility_seconds=60):
        await until(lambda: stolen)
        await asyncio.sleep(0.5)
    assert work.shard() == stolen[0]
    assert work.num_left == 1


async def test_a_part_that_is_none_counts_as_not_there(rig: Rig) -> None:
    """Its lines are run again; parts that overlap count once."""
    work = rig.batch(*[GOOD] * 4, rings=False)
    old = work.claim(lease_seconds=-1)
    row = b'{"custom_id":"old"}\n'
    bucket = rig.deployment.bucket
    rig.run(bucket.put_part(old, 0, b"nonsense"))
    for number, lines in enumerate([(1, 2), (2,)], start=1):
        part = encode_part(FinishedRow(line, row, is_success=True) for line in lines)
        rig.run(bucket.put_part(old, number, part))
    work.ring()
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    assert running.engine.requests == ["c3", "c4"]
    assert work.ids() == ["old", "old", "c3", "c4"]


async def test_what_is_unexpected_ends_one_shard_only(rig: Rig) -> None:
    """An error of ours is logged, the shard given back with an attempt, the next one run."""
    bad, good = rig.batch(GOOD, rings=False), rig.batch(GOOD, rings=False)

    def refuse(call: Call) -> Exception | None:
        is_bad = is_part(call) and bad.id in call.arguments["Key"]
        return ZeroDivisionError("injected") if is_bad else None

    async with failing(rig, refuse, visibility_seconds=60):
        bad.ring()
        await until(lambda: bad.shard().fence and bad.is_free)
        good.ring()
        await until(lambda: good.is_done)
    assert bad.shard().attempts == 1


async def test_a_worker_that_can_take_no_work_ends_badly(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it could end well: it costs money, and a good end would go unnoticed."""
    monkeypatch.setattr(worker_module, "MAX_BACKOFF_SECONDS", 0.01)
    refuses = times(-1, lambda call: call.method == "receive_message")
    async with failing(rig, refuses, exit_when_idle_seconds=0) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1


async def test_messages_that_come_too_late_are_put_back(rig: Rig) -> None:
    """A call for messages that is still out when the worker stops swallows none."""
    async with AioAws() as aws, rig.worker(aws=aws, wait_seconds=3) as running:
        await until(lambda: running.worker._polling)
        await asyncio.sleep(0.3)
        running.worker.stop()
        await until(lambda: running.worker._returning)
        work = rig.batch(GOOD)
    assert rig.messages(rig.queue) == [{"batch_id": work.id, "shard": 0}]
    assert work.shard().fence == 0


async def test_repeated_messages_run_a_shard_once(rig: Rig) -> None:
    """They may come while it runs or when it is done."""
    work = rig.batch({"wait": 1}, rings=False)
    work.ring(0, 0, 0)
    async with rig.worker() as running:
        await until(lambda: work.is_done and not rig.run(rig.queue.count()))
        work.ring()
        await until(lambda: not rig.run(rig.queue.count()))
    assert running.engine.requests == ["c1"]
    assert work.shard().fence == 1
