"""Metrics of a worker: each durable row counts once, despite other workers and failures."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.emulators import MODEL
from tests.handler.emf import Line, lines_in, totals
from tests.handler.worker.fakes import FakeEngine, FaultyAws, QuickAws, is_commit
from tests.handler.worker.rig import (
    NEVER,
    PATIENCE_SECONDS,
    Rig,
    RunningWorker,
    Work,
    until,
    wait_for,
    well,
)
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.progress_counts import Progress
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.queues import Queue
from tidemill.handler.errors import AwsError
from tidemill.handler.worker.context import context as site_module
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.shard.claim import Claim
from tidemill.handler.worker.shard.line_order import LineOrder
from tidemill.handler.worker.shard.message import ShardMessage
from tidemill.handler.worker.shard.shard_run import ShardRun
from tidemill.protocol.contract import Usage

GOOD: dict[str, Any] = {}
BAD: dict[str, Any] = {"status": 400}
FIRST_ROW = encode_part([FinishedRow(1, b"{}\n", is_success=True, usage=Usage(10, 4, 3))])
COUNTS = ("RowsCompleted", "RowsFailed", "PromptTokens", "CachedTokens", "CompletionTokens")
Counted = Callable[[], list[Line]]


@pytest.fixture
def counted(capsys: pytest.CaptureFixture[str]) -> Counted:
    """Return a function that returns the lines since its last call."""
    return lambda: lines_in(capsys.readouterr().out)


def row_sums(lines: list[Line]) -> tuple[float, ...]:
    """Return the sums of the metrics of rows."""
    sums = totals(lines)
    return tuple(sums[name] for name in COUNTS)


def done(*works: Work) -> tuple[float, ...]:
    """Return what the table says of the same."""
    shards = [work.shard(number) for work in works for number in range(work.num_shards)]
    total = sum((shard.progress for shard in shards), start=Progress())
    return (
        total.completed,
        total.failed,
        total.prompt_tokens,
        total.cached_tokens,
        total.completion_tokens,
    )


def with_figure(lines: list[Line], name: str) -> list[Line]:
    """Return the lines that have a figure."""
    return [line for line in lines if name in line.figures]


async def test_the_metrics_of_a_run_are_those_in_the_table(rig: Rig, counted: Counted) -> None:
    """Rows, tokens, GPU time, rate and cache come by model; the rest when the worker ends."""
    work = rig.batch(*[{"wait": 0.5}] * 4, BAD, b"{\n", shard_lines=2)
    async with rig.worker():
        await until(lambda: work.is_done)
    lines = counted()
    assert row_sums(lines) == done(work) == (4, 2, 40, 16, 12)
    [line] = with_figure(lines, "RowsCompleted")
    assert line.dimensions == {"service": "worker", "model": MODEL}
    assert line.labels == {}
    gpu_seconds = sum(work.shard(number).progress.gpu_seconds for number in range(3))
    assert line.figures["GpuSeconds"] == pytest.approx(gpu_seconds, abs=0.01)
    assert line.figures["TokensPerSecond"] > 0
    assert line.figures["KvCacheUse"] == 25
    assert line.units["KvCacheUse"] == "Percent"


async def test_each_claim_reports_how_long_its_message_waited(rig: Rig, counted: Counted) -> None:
    """The time counts from the queue's receipt, and the batch is named."""
    work = rig.batch(GOOD, GOOD, shard_lines=1)
    await asyncio.sleep(1.2)
    async with rig.worker():
        await until(lambda: work.is_done)
    waits = with_figure(counted(), "QueueWaitSeconds")
    assert [line.labels for line in waits] == [{"batch_id": work.id}] * 2
    assert all(1 < line.figures["QueueWaitSeconds"] < 60 for line in waits)


async def test_a_shard_that_is_taken_over_counts_once(
    rig: Rig, counted: Counted, tmp_path: Path
) -> None:
    """Rows that the first worker has reported are not reported by the second."""
    gate = tmp_path / "gate"
    work = rig.batch(GOOD, BAD, GOOD, {"gate": str(gate)})
    async with rig.worker() as first:
        await until(lambda: len(work.index()) == 3 and first.engine.inside)
    before = counted()
    assert row_sums(before) == (2, 1, 20, 8, 6)
    gate.touch()
    async with rig.worker():
        await until(lambda: work.is_done)
    assert row_sums(counted()) == (1, 0, 10, 4, 3)
    assert done(work) == (3, 1, 30, 12, 9)


async def test_unreported_rows_of_a_dead_worker_are_reported(rig: Rig, counted: Counted) -> None:
    """The shard's next owner reports them: they are durable, but not yet in the table."""
    work = rig.batch(*[GOOD] * 3, rings=False)
    dead = work.claim(lease_seconds=-1)
    rig.run(rig.deployment.bucket.put_part(dead, 0, FIRST_ROW))
    work.ring()
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    assert "c1" not in running.engine.requests
    assert row_sums(counted()) == done(work) == (3, 0, 30, 12, 9)


async def test_recorded_rows_of_a_dead_worker_are_not_reported(rig: Rig, counted: Counted) -> None:
    """The dead worker reported them, or they are lost; no row is ever reported twice."""
    work = rig.batch(*[GOOD] * 3, rings=False)
    dead = work.claim(lease_seconds=60)
    rig.run(rig.deployment.bucket.put_part(dead, 0, FIRST_ROW))
    progress = Progress(completed=1, prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    rig.run(rig.deployment.table.renew(dead, lease_until=0, progress=progress, attempts=0))
    work.ring()
    async with rig.worker():
        await until(lambda: work.is_done)
    assert row_sums(counted()) == (2, 0, 20, 8, 6)


async def test_a_line_that_kills_the_engine_counts_its_neighbours_once(
    rig: Rig, counted: Counted
) -> None:
    """They may run several times before the guilty one is found; each death is counted."""
    bodies: list[Any] = [GOOD] * 8
    bodies[3] = {"die": 1, "wait": 0.05}
    work = rig.batch(*bodies)
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    lines = counted()
    assert len(running.engine.requests) > 8
    assert row_sums(lines) == done(work) == (7, 1, 70, 28, 21)
    deaths = with_figure(lines, "EngineDeaths")
    assert len(deaths) == running.engine.num_lives - 1 > 1
    assert all(line.figures == {"EngineDeaths": 1} for line in deaths)


async def test_an_engine_that_cannot_start_is_counted(rig: Rig, counted: Counted) -> None:
    """No other metric shows that a worker starts and ends without doing anything."""
    async with rig.worker(engine=FakeEngine(refuses_after=0)) as running:
        await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS)
    [line] = counted()
    assert (line.dimensions["model"], line.figures) == (MODEL, {"EngineDeaths": 1})


@asynccontextmanager
async def failing(
    rig: Rig, refuses: Callable[[Call], Exception | None], *, after: bool, **changes: Any
) -> AsyncIterator[RunningWorker]:
    """Run a worker whose calls fail, or whose answers are lost."""
    async with QuickAws() as aws:
        faulty = FaultyAws(aws, refuses, after=after)
        async with rig.worker(aws=faulty, **changes) as running:
            yield running


@pytest.mark.parametrize("after", [False, True], ids=["call", "answer"])
async def test_calls_that_are_repeated_count_once(
    rig: Rig, counted: Counted, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """Every fifth write to the bucket or the table fails, or succeeds and its answer is lost."""
    monkeypatch.setattr(site_module, "RETRY_SECONDS", 0.05)
    num_writes = 0

    def every_fifth(call: Call) -> Exception | None:
        nonlocal num_writes
        num_writes += call.method in {"put_object", "update_item", "transact_write_items"}
        is_hit = num_writes % 5 == 0
        num_writes += is_hit
        return AwsError("injected") if is_hit else None

    work = rig.batch(*[{"wait": 0.1}] * 12, BAD, shard_lines=5)
    async with failing(rig, every_fifth, after=after, max_inflight=4, tick_seconds=0.2):
        await until(lambda: work.is_done)
    assert row_sums(counted()) == done(work) == (12, 1, 120, 48, 36)


async def test_a_shard_that_another_has_taken_is_a_lost_lease(rig: Rig, counted: Counted) -> None:
    """Its rows are not counted here: the new owner counts them."""
    work = rig.batch(GOOD, {"wait": NEVER})
    async with rig.worker(flush_seconds=NEVER, lease_seconds=6) as running:
        await until(lambda: running.engine.inside == {"c2"})
        taken = rig.run(
            rig.deployment.table.claim(
                work.id, 0, owner="another", now=0, lease_seconds=60, steal=True
            )
        )
        await until(lambda: not running.engine.inside)
    lines = counted()
    [line] = with_figure(lines, "LeasesLost")
    assert line.figures == {"LeasesLost": 1}
    assert line.labels == {"batch_id": work.id, "shard": 0}
    assert row_sums(lines) == (0, 0, 0, 0, 0)
    assert work.shard() == taken


async def test_a_commit_that_comes_too_late_counts_nothing(rig: Rig, counted: Counted) -> None:
    """The rows are durable, and the one who has the shard now will find them."""
    work = rig.batch(GOOD)
    stolen: list[object] = []
    lines: list[Line] = []

    def steal(call: Call) -> Exception | None:
        if is_commit(call) and not stolen:
            # Leased for so long that the worker has no way to claim it again.
            options = {"owner": "x", "now": time.time(), "lease_seconds": NEVER, "steal": True}
            stolen.append(rig.run(rig.deployment.table.claim(work.id, 0, **options)))
        return None

    def is_lost() -> bool:
        lines.extend(counted())
        return bool(with_figure(lines, "LeasesLost"))

    # No heartbeat reports the row before the commit, however long that takes.
    seconds = dict.fromkeys(("visibility_seconds", "lease_seconds", "tick_seconds"), NEVER)
    async with failing(rig, steal, after=False, **seconds):
        await until(is_lost)
    lines += counted()
    assert len(with_figure(lines, "LeasesLost")) == 1
    assert row_sums(lines) == done(work) == (0, 0, 0, 0, 0)


async def test_answers_in_another_order_count_nothing_twice(rig: Rig) -> None:
    """A renewal's answer may come after that of the commit that was sent later."""
    work = rig.batch(*[GOOD] * 9)
    async with QuickAws() as aws:
        context = WorkerContext(aws, rig.deployment, rig.queue, rig.config())
        [message] = await aws.run(rig.queue.receive(visibility_seconds=30))
        doorbell = ShardMessage(context, message)
        claim = Claim(work.claim(), work.batch, doorbell, 0.0)
        run = ShardRun(claim, context, LineOrder(0), lambda: None, well)
    for completed in (3, 7, 5, 7, 9, 3):
        run.meter.record(Progress(completed=completed, prompt_tokens=10 * completed))
    figures = context.usage_meter.collect()
    assert (figures["RowsCompleted"], figures["PromptTokens"]) == (9, 90)  # type: ignore[index]


async def test_a_queue_of_no_known_model_has_no_model(rig: Rig) -> None:
    """An operator may name any queue; its figures are the worker's alone."""
    async with QuickAws() as aws:
        context = WorkerContext(aws, rig.deployment, Queue("https://sqs/other"), rig.config())
    assert context.model is None


# In a separate process


def test_a_worker_emits_metrics_on_its_standard_output(rig: Rig) -> None:
    """They are among its log lines, each whole; the last comes before it ends."""
    work = rig.batch(*[GOOD] * 3, BAD)
    process = rig.start()
    wait_for(lambda: work.is_done, lambda: process.log)
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.log
    assert row_sums(lines_in(process.log)) == done(work) == (3, 1, 30, 12, 9)
