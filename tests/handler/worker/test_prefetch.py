"""Prefetched shards of a worker, and the order of their lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.engine_process.scripted_engine import ScriptedEngine
from tests.handler.worker.fakes import QuickAws
from tests.handler.worker.rig import Rig, Work, until, well
from tidemill.batch.file.throughput import Rates
from tidemill.batch.model import Batch
from tidemill.batch.progress_counts import Progress
from tidemill.engine_process.frames import Row
from tidemill.handler.worker import prefetch as prefetch_module
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.feed import Engine, Feed, Feeds
from tidemill.handler.worker.gpu_time import EngineLoad, GpuTime
from tidemill.handler.worker.prefetch import FEW_SHARDS, Prefetch
from tidemill.handler.worker.shard.claim import claim_shard
from tidemill.handler.worker.shard.message import ShardMessage
from tidemill.handler.worker.shard.shard_run import ShardRun
from tidemill.protocol.contract import Reply, Usage

GOOD: dict[str, Any] = {}


@pytest_asyncio.fixture
async def context(rig: Rig) -> AsyncIterator[WorkerContext]:
    """Return where a worker works."""
    async with QuickAws() as aws:
        yield WorkerContext(aws, rig.deployment, rig.queue, rig.config())


class Owned:
    """Shards that one worker has claimed."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.runs: list[ShardRun] = []
        self.prefetch = Prefetch(context, self.runs)

    async def claim(self, work: Work, number: int) -> ShardRun:
        """Claim a shard, and read its lines."""
        work.ring(number)
        [message] = await self.context.aws.run(self.context.queue.receive(visibility_seconds=30))
        owner = f"{id(self)}-{number}"
        claim = await claim_shard(self.context, ShardMessage(self.context, message), owner=owner)
        assert claim is not None
        order = self.prefetch.order_of(work.id)
        self.runs.append(ShardRun(claim, self.context, order, lambda: None, well))
        await self.runs[-1]._open()
        return self.runs[-1]

    def feed(self, engine: Engine, max_inflight: int) -> Feed:
        """Return what feeds an engine with their lines."""
        time = GpuTime(self.context, self.runs)
        feeds = Feeds(self.runs, time, self.prefetch, max_held_bytes=2**20)
        feed = Feed(engine, feeds, EngineLoad(), max_inflight=max_inflight)
        feeds.live.append(feed)
        return feed


@dataclass
class Answers:
    """An engine that replies at once; `requests` are its lines in their order."""

    requests: list[int] = field(default_factory=list)

    async def fetch_row(self, number: int, created: int, data: bytes) -> Row:
        """Answer a line."""
        self.requests.append(number)
        return Row(created, True, Usage(), data)  # noqa: FBT003


class NeverAnswers:
    """An engine that takes its time."""

    async def fetch_row(self, *_: object) -> Row:
        """Answer no line."""
        return await asyncio.Future()


async def test_lines_of_a_prefix_run_together_whatever_shard_they_are_in(
    rig: Rig, context: WorkerContext
) -> None:
    """The shards were claimed together; lines that were claimed later come later."""
    bodies = [{"prompt": 1_000 * text} for text in "abcabcabc"]
    work = rig.batch(*bodies, shard_lines=3, rings=False)
    owned = Owned(context)
    for number in (1, 0):
        await owned.claim(work, number)
    assert not owned.prefetch.wants_shard(6)
    assert owned.prefetch.wants_shard(7)
    await owned.claim(work, 2)
    engine = Answers()
    owned.feed(engine, max_inflight=1).admit()
    await until(lambda: all(run.pending.is_finished for run in owned.runs))
    assert engine.requests == [4, 1, 5, 2, 6, 3, 7, 8, 9]


async def test_batches_take_turns(rig: Rig, context: WorkerContext) -> None:
    """A small one does not wait for all the lines that were claimed of a large one."""
    large, small = rig.batch(*[GOOD] * 6, rings=False), rig.batch(*[GOOD] * 2, rings=False)
    owned = Owned(context)
    runs = [await owned.claim(large, 0), await owned.claim(small, 0)]
    owned.feed(NeverAnswers(), max_inflight=4).admit()
    assert [run.pending.num_inflight for run in runs] == [2, 2]
    for run in runs:
        run.abort()


async def test_a_batch_that_comes_first_has_eight_lines_for_one_of_another(
    rig: Rig, context: WorkerContext
) -> None:
    """It holds among batches of one tenant; another tenant's share does not change."""
    works = [
        rig.batch(*[GOOD] * 40, rings=False, priority=priority, tenant=tenant)
        for priority, tenant in ((0, "owner"), (-5, "owner"), (7, "other"))
    ]
    owned = Owned(context)
    runs = [await owned.claim(work, 0) for work in works]
    owned.feed(NeverAnswers(), max_inflight=34).admit()
    assert [run.pending.num_inflight for run in runs] == [2, 16, 16]
    for run in runs:
        run.abort()


class Waiting(NamedTuple):
    """A run whose lines wait."""

    batch: Batch
    num_waiting: int = 4
    rate: float = 0.0

    @property
    def meter(self) -> Any:
        """Return its rates alone."""
        return SimpleNamespace(pace=SimpleNamespace(rates=Rates(self.rate)))


async def num_taken(
    context: WorkerContext, *batches: Batch, rows_per_second: float, max_inflight: int = 1
) -> int:
    """Return how many shards a worker takes that has one of each of these batches."""
    runs = [Waiting(batch) for batch in batches]
    runs[0] = runs[0]._replace(rate=rows_per_second)
    prefetch = Prefetch(context, runs)  # type: ignore[arg-type]
    await prefetch.update()
    while prefetch.wants_shard(max_inflight):
        runs.append(Waiting(batches[0]))
    return len(runs)


async def test_as_much_is_prefetched_as_runs_in_five_minutes(
    rig: Rig, context: WorkerContext
) -> None:
    """It is at most a share of the remainder, by the number of workers on the batch."""
    batch = (work := rig.batch(*[GOOD] * 160, shard_lines=4, rings=False)).batch
    other = rig.batch(GOOD, rings=False).batch
    assert await num_taken(context, batch, rows_per_second=0) == 1
    assert await num_taken(context, batch, rows_per_second=0, max_inflight=100) == FEW_SHARDS
    assert await num_taken(context, batch, rows_per_second=0.2) == 15
    assert await num_taken(context, batch, rows_per_second=9) == 32
    assert await num_taken(context, batch, other, rows_per_second=9) == 2
    drained = [Waiting(batch, 0), *[Waiting(other, 0)] * 8]
    assert Prefetch(context, drained).wants_shard(1)  # type: ignore[arg-type]
    drained.append(Waiting(batch))
    assert not Prefetch(context, drained).wants_shard(100)  # type: ignore[arg-type]
    for number, owner in enumerate(["a-b-0", "a-b-1", "c-0"]):
        shard = work.claim(number, owner=owner)
    assert await num_taken(context, batch, rows_per_second=9) == 14
    table = rig.deployment.table
    rig.run(table.commit(shard, progress=Progress(), output_sizes=(), error_sizes=()))
    assert await num_taken(context, batch, rows_per_second=9) == 32


async def test_a_very_large_batch_has_no_more_shards_renewed_than_a_partition_allows(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand workers own three each."""
    monkeypatch.setattr(prefetch_module, "_MAX_LIVE", 16)
    work = rig.batch(*[GOOD] * 400, shard_lines=4, rings=False)
    for number in range(3):
        work.claim(number, owner=f"{number}-0")
    assert await num_taken(context, work.batch, rows_per_second=9) == 16 // 3


async def test_shards_are_prefetched_once_little_waits(context: WorkerContext, rig: Rig) -> None:
    """Together, so that their lines are ordered together."""
    batch = rig.batch(*[GOOD] * 160, shard_lines=4, rings=False).batch
    runs = [Waiting(batch, rate=9)]
    prefetch = Prefetch(context, runs)  # type: ignore[arg-type]
    await prefetch.update()
    first = prefetch.order_of(batch.id)
    wanted = {}
    for num_waiting in (4, 159, 160, 100, 20, 19, 100, 160):
        runs[0] = runs[0]._replace(num_waiting=num_waiting)
        wanted[num_waiting] = prefetch.wants_shard(1)
    assert not prefetch.is_ahead
    runs[0] = runs[0]._replace(num_waiting=19)
    assert prefetch.wants_shard(1)
    assert not prefetch.is_ahead  # no shard of this fill was claimed
    assert wanted == {4: True, 159: True, 160: False, 100: True, 20: False, 19: True}
    assert prefetch.order_of(batch.id) is not first
    assert prefetch.is_ahead
    assert prefetch.wants_shard(20)
    assert not prefetch.is_ahead  # the engines need it


async def test_a_worker_prefetches_and_loses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are in the order of the file; later ones wait until the worker has many shards."""
    monkeypatch.setattr(Prefetch, "is_due", lambda *_: True)
    monkeypatch.setattr(prefetch_module, "_MAX_SECONDS", 1e9)  # however long the claims take
    first, rest = [GOOD] * 4, [{"gated": True}] * 44
    work = rig.batch(*first, *rest, shard_lines=4)
    has_many, respond = asyncio.Event(), ScriptedEngine.respond

    async def respond_at_the_gate(engine: ScriptedEngine, url: str, body: Any, *args: Any) -> Reply:
        if "gated" in body:
            await has_many.wait()
        return await respond(engine, url, body, *args)

    monkeypatch.setattr(ScriptedEngine, "respond", respond_at_the_gate)

    def is_done() -> bool:
        shards = [work.shard(number) for number in range(work.num_shards)]
        if sum(shard.owner is not None for shard in shards) > FEW_SHARDS:
            has_many.set()
        return work.is_done

    async with rig.worker(max_inflight=2, tick_seconds=0.15):
        await until(is_done)
    assert has_many.is_set()
    assert work.ids() == [f"c{number}" for number in range(1, 49)]
