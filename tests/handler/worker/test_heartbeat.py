"""Heartbeat: what is kept alive, how often, and what ends a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from tests.emulators import MODEL
from tests.handler.emf import lines_in
from tests.handler.worker.rig import NEVER, Rig, until, well
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.engine_process.frames import Row
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.stores.usage import EVERYBODY
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.feed import Feed, Feeds
from tidemill.handler.worker.gpu_time import EngineLoad, GpuTime
from tidemill.handler.worker.heartbeat import Heartbeat, end_reason
from tidemill.handler.worker.prefetch import Prefetch
from tidemill.handler.worker.shard.claim import claim_shard
from tidemill.handler.worker.shard.line_order import LineOrder
from tidemill.handler.worker.shard.message import ShardMessage
from tidemill.handler.worker.shard.shard_run import ShardRun
from tidemill.protocol.contract import EngineStats, Usage

GOOD: dict[str, Any] = {}


class Clock:
    """A clock that is set by hand."""

    now = 1_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest_asyncio.fixture
async def context(rig: Rig) -> AsyncIterator[WorkerContext]:
    """Return where a worker works."""
    async with AioAws() as aws:
        yield WorkerContext(
            aws, rig.deployment, rig.queue, rig.config(lease_seconds=30), clock=Clock()
        )


async def claimed(context: WorkerContext) -> ShardRun:
    """Claim the shard of the one message that is there."""
    [message] = await context.aws.run(context.queue.receive(visibility_seconds=30))
    claim = await claim_shard(context, ShardMessage(context, message), owner="me")
    assert claim is not None
    return ShardRun(claim, context, LineOrder(0), lambda: None, well)


def beats(context: WorkerContext, runs: list[ShardRun]) -> Heartbeat:
    """Return the heartbeat of these runs."""
    return Heartbeat(context, runs, GpuTime(context, runs), Prefetch(context, runs))


async def done(heartbeat: Heartbeat) -> None:
    """Beat once and wait for what that has begun."""
    heartbeat.beat()
    await until(lambda: not heartbeat._going)


async def test_a_lease_is_renewed_before_it_ends_and_not_at_each_beat(
    rig: Rig, context: WorkerContext
) -> None:
    """It is renewed after a third of its time, or earlier to report progress."""
    work = rig.batch(GOOD)
    run = await claimed(context)
    heartbeat = beats(context, [run])
    sent = []
    for now in (1_000, 1_009, 1_010, 1_019, 1_020):
        context.clock.now = now  # type: ignore[attr-defined]
        before = work.shard().lease_until
        await done(heartbeat)
        if work.shard().lease_until != before:
            sent.append(now)
        assert run.lease.sent_at == max(sent)
    assert sent == [1_000, 1_010, 1_020]


async def test_a_pace_goes_on_in_the_next_shard_of_its_batch(
    rig: Rig, context: WorkerContext
) -> None:
    """The first beat reports it even without a previous owner, and in a minute it is over."""
    work = rig.batch(GOOD, GOOD, GOOD, shard_lines=1)
    ended = await claimed(context)
    context.clock.now += 10  # type: ignore[attr-defined]
    ended.meter.pace.add(50, Usage())
    context.keep_pace(work.batch.id, ended.meter.pace)
    heir = await claimed(context)
    await done(beats(context, [heir]))
    assert work.shard(heir.shard.number).progress.rows_per_second == 5.0
    context.keep_pace(work.batch.id, heir.meter.pace)
    context.clock.now += 61  # type: ignore[attr-defined]
    context.keep_pace("another", ended.meter.pace)
    assert context.paces == {}


async def test_a_claim_counts_once_a_line_of_it_has_run(rig: Rig, context: WorkerContext) -> None:
    """A worker that dies has tried no shard of which it had read the lines alone."""
    work = rig.batch(GOOD)
    run = await claimed(context)
    heartbeat = beats(context, [run])
    await done(heartbeat)
    assert work.shard().attempts == 1
    context.clock.now += 10  # type: ignore[attr-defined]
    await run._open()
    await done(heartbeat)
    assert work.shard().attempts == 0
    context.clock.now += 10  # type: ignore[attr-defined]
    run.pending.pop()
    await done(heartbeat)
    assert work.shard().attempts == 1


async def test_a_lease_that_ended_is_not_renewed(rig: Rig, context: WorkerContext) -> None:
    """A process that was stopped for long looks at its clock first."""
    work = rig.batch(GOOD)
    run = await claimed(context)
    context.clock.now += 30  # type: ignore[attr-defined]
    before = work.shard()
    heartbeat = beats(context, [run])
    await done(heartbeat)
    assert run.is_ending
    assert work.shard() == before


async def test_a_call_that_hangs_holds_nothing_up(rig: Rig, context: WorkerContext) -> None:
    """It is not begun twice, is given up in time for another try, and the others go on."""
    for _ in range(2):
        rig.batch(GOOD)
    hung, ended = 0, set()

    class Hanging:
        async def run(self, operation: Any) -> Any:
            nonlocal hung
            if operation.__name__ == "renew":
                hung += 1
                await asyncio.sleep(NEVER)
            result = await context.aws.run(operation)
            ended.add(operation.__name__)
            return result

    quick = replace(context, config=rig.config(lease_seconds=0.6))
    runs = [await claimed(quick), await claimed(quick)]
    heartbeat = beats(replace(quick, aws=Hanging()), runs)
    heartbeat.beat()
    heartbeat.beat()
    await asyncio.sleep(0)
    assert hung == 2
    await until(lambda: not heartbeat._going)

    def others_end() -> bool:
        heartbeat.beat()
        return "get_batch" in ended

    await until(others_end)
    assert not runs[0].is_ending
    quick.clock.now += 0.6  # type: ignore[attr-defined]
    heartbeat.beat()
    assert runs[0].is_ending


async def test_sums_are_added_once_however_slow_their_write_is(
    rig: Rig, context: WorkerContext
) -> None:
    """One that was given up had been made, and the next beat's would add it again."""

    class Slow:
        async def run(self, operation: Any) -> Any:
            result = await context.aws.run(operation)
            if operation.__name__ == "add_gpu_seconds":
                await asyncio.sleep(0.2)
            return result

    slow = replace(context, aws=Slow(), config=rig.config(lease_seconds=0.15))
    slow.gpu_usage.add("owner", 3.0)
    await done(beats(slow, []))
    for tenant in ("owner", EVERYBODY):
        today = rig.deployment.usage.gpu_seconds_today(tenant, time.time())
        assert rig.run(today) == 3.0
    assert not slow.gpu_usage.is_due(NEVER + slow.clock())


async def test_a_duty_under_way_is_finished_and_one_that_hangs_is_not(
    context: WorkerContext,
) -> None:
    """Sums that a worker is writing as it stops would be lost, or written twice."""
    heartbeat, ended = beats(context, []), []

    async def duty(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append(name)

    beating = asyncio.create_task(heartbeat.run())
    heartbeat.start("quick", lambda: duty("quick", 0.1))
    heartbeat.start("slow", lambda: duty("slow", NEVER))
    await asyncio.sleep(0)
    beating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beating
    assert ended == ["quick"]
    await until(lambda: not heartbeat._going)


async def test_the_time_of_the_gpus_is_shared_by_use(rig: Rig, context: WorkerContext) -> None:
    """Shares follow the requests in flight; time of an idle or stopped process is not charged."""
    rig.batch(*[GOOD] * 4)
    rig.batch(*[GOOD] * 4)
    runs = [await claimed(context), await claimed(context)]
    gpu_time, one, other = GpuTime(context, runs), EngineLoad(2), EngineLoad(1)
    gpu_time.engines += [one, other]
    context.clock.now += 1  # type: ignore[attr-defined]
    gpu_time.share()
    assert [run.meter.gpu_seconds for run in runs] == [0, 0]
    for number, run in enumerate((runs[0], runs[0], runs[0], runs[1])):
        one.add(run, number)
    context.clock.now += 1  # type: ignore[attr-defined]
    gpu_time.share()
    assert [run.meter.gpu_seconds for run in runs] == [1.5, 0.5]
    context.clock.now += 20  # type: ignore[attr-defined]
    gpu_time.share()
    assert sum(run.meter.gpu_seconds for run in runs) == 2 + 2 * 2 * context.config.tick_seconds
    for run in runs:
        run.meter.gpu_seconds = 0
    other.add(runs[1], 5)
    context.clock.now += 1  # type: ignore[attr-defined]
    gpu_time.share()
    assert [run.meter.gpu_seconds for run in runs] == [1.5, 1.5]
    other.remove(runs[1], 5)
    context.clock.now += 1  # type: ignore[attr-defined]
    gpu_time.share()
    assert [run.meter.gpu_seconds for run in runs] == [3, 2]


async def test_requests_shorter_than_a_beat_have_their_time(
    rig: Rig, context: WorkerContext
) -> None:
    """It is counted as they come and go: nothing before the first and behind the last of them."""
    rig.batch(*[GOOD] * 3)
    run = await claimed(context)
    run.pending = type(run.pending)(await run._input.read_lines())
    run.is_open = True
    gpu_time = GpuTime(context, [run])

    class Engine:
        async def fetch_row(self, number: int, *_: object) -> Row:
            context.clock.now += 0.25  # type: ignore[attr-defined]
            return Row(number, True, Usage(10, 4, 3), b"{}\n")  # noqa: FBT003

    context.clock.now += 0.5  # type: ignore[attr-defined]
    prefetch = Prefetch(context, [run])
    feeds = Feeds([run], gpu_time, prefetch, max_held_bytes=2**20)
    load = EngineLoad(2)
    feeds.add(Feed(Engine(), feeds, load, max_inflight=1))
    await until(lambda: run.pending.is_finished and not load.lines)
    context.clock.now += 8  # type: ignore[attr-defined]
    gpu_time.share()
    assert run.meter.gpu_seconds == 2 * 3 * 0.25


async def test_metrics_are_emitted_once_a_minute_of_work(
    rig: Rig, context: WorkerContext, capsys: pytest.CaptureFixture[str]
) -> None:
    """They include the time with requests, and the highest use of the cache."""
    context = replace(context, config=rig.config(lease_seconds=30, tick_seconds=3))
    rig.batch(*[GOOD] * 4)
    run = await claimed(context)
    capsys.readouterr()
    gpu_time = GpuTime(context, [run])
    heartbeat = Heartbeat(context, [run], gpu_time, Prefetch(context, [run]))
    used = iter([0.5, 0.75, *[0.25] * 100])
    load = EngineLoad(1, lambda: EngineStats(kv_cache_usage=next(used)))
    load.add(run, 1)
    gpu_time.engines.append(load)
    run.meter.durable = Progress(completed=2, completion_tokens=60)
    emitted = []
    for _ in range(45):
        context.clock.now += 3  # type: ignore[attr-defined]
        run.lease.renewed(context.clock())
        await done(heartbeat)
        emitted += [(context.clock() - 1_000, line) for line in lines_in(capsys.readouterr().out)]
    assert [at for at, _ in emitted] == [63, 126]
    first, second = (line.figures for _, line in emitted)
    assert (first["RowsCompleted"], second["RowsCompleted"]) == (2, 0)
    assert first["TokensPerSecond"] == round(60 / 63, 3)
    assert (first["KvCacheUse"], second["KvCacheUse"]) == (75, 25)
    assert run.meter.gpu_seconds == 45 * 3


def test_why_a_batch_goes_no_further(rig: Rig) -> None:
    """Its status, its window, or that it is gone."""
    batch = rig.batch(GOOD, rings=False).batch
    assert end_reason(batch, batch.expires_at - 1) is None
    assert end_reason(batch, batch.expires_at) == "the batch has expired"
    assert end_reason(None, 0) == "the batch no longer exists"
    cancelling = batch.moved(Status.CANCELLING, 0)
    assert end_reason(cancelling, 0) == "the batch is cancelling"


async def test_the_pace_of_a_model_is_reported(rig: Rig, context: WorkerContext) -> None:
    """First durable rows are reported at once, and rates when they are known."""
    fleets = context.deployment.fleets
    heartbeat = beats(context, [])
    await done(heartbeat)
    assert rig.run(fleets.get_rate(MODEL)).rows_at == 0
    context.rate_meter.add_busy(50, is_full=True)
    context.rate_meter.add(Progress(completed=100, prompt_tokens=250))
    await done(heartbeat)
    pace = rig.run(fleets.get_rate(MODEL))
    assert pace.rows_at >= time.time() - 60
    assert (pace.rows_per_second, pace.tokens_per_second) == (2.0, 5.0)
