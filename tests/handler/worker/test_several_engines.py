"""One worker with several engines: who gets a line, and what the death of one of them costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.handler.worker.fakes import FakeEngine
from tests.handler.worker.rig import (
    NEVER,
    PATIENCE_SECONDS,
    Process,
    Rig,
    until,
    wait_for,
    well,
)
from tests.warm_start import COLD_VARIABLE
from tidemill.batch.file.lines import RawLine
from tidemill.engine_process.frames import Row
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.feed import Feed, Feeds
from tidemill.handler.worker.gpu_time import EngineLoad, GpuTime
from tidemill.handler.worker.prefetch import Prefetch
from tidemill.handler.worker.shard.claim import claim_shard
from tidemill.handler.worker.shard.line_order import LineOrder
from tidemill.handler.worker.shard.message import ShardMessage
from tidemill.handler.worker.shard.pending_lines import PendingLines
from tidemill.handler.worker.shard.shard_run import ShardRun
from tidemill.protocol.contract import Usage

GOOD: dict[str, Any] = {}
KNOWN = ("/v1/completions",)


def names(*numbers: int) -> list[str]:
    """Return the custom ids of lines with these numbers."""
    return [f"c{number}" for number in numbers]


async def loaded(*engines: FakeEngine) -> None:
    """Wait until all engines have answered the known line."""
    await until(lambda: all(one.requests == ["known"] and not one.inside for one in engines))


async def test_the_lines_of_one_shard_are_shared(rig: Rig) -> None:
    """Half each, though one engine had room for all; the rows are in the order of the lines."""
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other]):
        await loaded(*engines)
        work = rig.batch(*[{"wait": n % 3 / 50} for n in range(40)])
        await until(lambda: work.is_done)
    assert work.ids() == names(*range(1, 41))
    shares = [engine.requests[1:] for engine in engines]
    assert sorted(shares[0] + shares[1]) == sorted(work.ids())
    assert [*map(len, shares)] == [20, 20]


async def test_a_death_costs_the_lines_in_it(rig: Rig) -> None:
    """The shard is not given back, and what the other engine has goes on."""
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other], flush_seconds=NEVER) as running:
        await loaded(*engines)
        work = rig.batch({"die": 1, "wait": 0.1}, *[{"wait": 0.2}] * 9, *[{"wait": 1}] * 10)
        await until(lambda: work.is_done)
    assert running.status == 0
    assert (work.shard().fence, work.shard().suspects) == (1, ())
    assert work.ids() == names(*range(2, 21))
    [row] = work.sealed("errors")
    assert row["response"]["body"]["error"]["code"] == "engine_killed"
    requests = one.requests + other.requests
    assert requests.count("c1") > 1
    assert [requests.count(name) for name in names(*range(11, 21))] == [1] * 10


async def test_the_last_death_gives_the_shards_back(rig: Rig) -> None:
    """The suspects of both engines are stored, and quarantined once they have run alone."""
    async with rig.worker(engine=FakeEngine(), other_engines=[FakeEngine()]):
        work = rig.batch(*[{"die": 1, "wait": 0.1}] * 2, GOOD)
        await until(lambda: work.is_done)
    assert (work.ids(), work.ids("errors")) == (names(3), names(1, 2))


async def test_suspects_run_alone_while_another_engine_goes_on(rig: Rig) -> None:
    """They have their engine for themselves, not the machine."""
    work = rig.batch(*[{"wait": 0.05}] * 8, *[{"wait": 1}] * 8, rings=False)
    claimed = work.claim()
    rig.run(
        rig.deployment.table.release(
            claimed, progress=claimed.progress, suspects=((2, 3), (6,)), quarantined=(), attempts=0
        )
    )
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other]):
        await loaded(*engines)
        work.ring()
        await until(lambda: work.is_done)
    assert one.requests[1:4] == names(2, 3, 6)
    assert {"c2", "c3"} in one.company
    assert all(
        some <= {"c2", "c3"} or some == {"c6"} or not some & {"c2", "c3", "c6"}
        for some in one.company
    )
    assert other.requests[1] == "c1"


async def test_an_engine_that_cannot_be_started_again_ends_the_worker(rig: Rig) -> None:
    """The next worker suspects only its own lines."""
    one, other = engines = [FakeEngine(endpoints=KNOWN, refuses_after=n) for n in (1, 9)]
    async with rig.worker(engine=one, other_engines=[other]) as running:
        await loaded(*engines)
        work = rig.batch({"die": 1, "wait": 0.1}, *[{"wait": NEVER}] * 3)
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert work.shard().suspects == ((1, 2),)
    assert (work.is_free, other.inside) == (True, set())


async def test_a_device_that_is_broken_blames_no_line(rig: Rig) -> None:
    """Its engine dies of a line of ours: the machine is left, with what others have finished."""
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other]) as running:
        await loaded(*engines)
        other.is_broken = True
        work = rig.batch(*[{"wait": NEVER}] * 2, GOOD, {"wait": 0.2})
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert other.requests == ["known", *names(3, 4), "known"]
    assert work.shard().quarantined == ()
    assert work.is_free


@pytest.mark.parametrize("order", ["first", "at once", "later"])
async def test_a_device_that_fails_them_all_blames_no_line(rig: Rig, order: str) -> None:
    """The line alone in an engine that merely died is not blamed, in either order of events."""
    work = rig.batch(*[{"wait": NEVER}] * 4, rings=False)
    claimed = work.claim()
    rig.run(
        rig.deployment.table.release(
            claimed, progress=claimed.progress, suspects=((1,),), quarantined=(), attempts=0
        )
    )
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other], flush_seconds=NEVER) as running:
        await loaded(*engines)
        work.ring()
        await until(lambda: one.inside and other.inside)
        alone, broken = engines if one.inside == {"c1"} else reversed(engines)
        broken.says_broken = True
        if order == "first":
            broken.kill()
        alone.kill()
        if order == "later":
            await until(lambda: alone.num_lives == 2)
        broken.kill()
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert (work.shard().suspects, work.shard().quarantined) == (((1,),), ())
    assert work.is_free


async def test_a_stop_lets_all_engines_finish(rig: Rig) -> None:
    """Within the time of grace, and the shard is committed."""
    one, other = engines = [FakeEngine(endpoints=KNOWN) for _ in range(2)]
    async with rig.worker(engine=one, other_engines=[other], grace_seconds=30) as running:
        await loaded(*engines)
        work = rig.batch(*[{"wait": 0.3}] * 4)
        await until(lambda: one.inside and other.inside)
    assert (running.status, work.is_done) == (0, True)


class ByHand:
    """An engine whose lines the test finishes; `requests` are the lines that it has received."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self._rows: list[asyncio.Future[Row]] = []

    async def fetch_row(self, number: int, *_: object) -> Row:
        """Return the row once it is finished."""
        self.requests.append(number)
        self._rows.append(asyncio.get_running_loop().create_future())
        return await self._rows[-1]

    async def finish(self, *places: int) -> None:
        """Finish lines by their places in `requests`."""
        for place in places:
            self._rows[place].set_result(Row(0, True, Usage(), b"{}\n"))  # noqa: FBT003
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def fed_by_hand(
    rig: Rig, *lines: RawLine, max_held_bytes: int = 2**20
) -> AsyncIterator[tuple[ByHand, ByHand]]:
    """Yield two engines, of 16 lines at once, that share the lines of one run."""
    rig.batch(GOOD)
    async with AioAws() as aws:
        context = WorkerContext(aws, rig.deployment, rig.queue, rig.config())
        [message] = await aws.run(rig.queue.receive(visibility_seconds=30))
        claim = await claim_shard(context, ShardMessage(context, message), owner="me")
        assert claim is not None
        runs: list[ShardRun] = []
        prefetch, gpu_time = Prefetch(context, runs, num_engines=2), GpuTime(context, runs)
        feeds = Feeds(runs, gpu_time, prefetch, max_held_bytes=max_held_bytes, num_engines=2)
        run = ShardRun(claim, context, LineOrder(0), feeds.admit, well)
        run.pending = PendingLines(lines)
        run.is_open = True
        runs.append(run)
        engines = ByHand(), ByHand()
        for engine in engines:
            feed = Feed(engine, feeds, EngineLoad(), max_inflight=16, max_num_seqs=4)
            feeds.live.append(feed)
        feeds.admit()
        await asyncio.sleep(0)
        yield engines
        run.abort()


async def test_lines_next_to_each_other_go_to_one_engine(rig: Rig) -> None:
    """Each is filled up by the quarter; at the end there is a share for each."""
    lines = [RawLine(number, b"{}") for number in range(1, 43)]
    async with fed_by_hand(rig, *lines) as (one, other):
        assert one.requests == [*range(1, 17)]
        assert other.requests == [*range(17, 33)]
        await one.finish(0, 1)
        await other.finish(0, 1, 2)
        await one.finish(2)
        assert len(one.requests + other.requests) == 32
        await other.finish(3)
        assert other.requests[16:] == [33, 34, 35, 36]
        await one.finish(3)
        assert one.requests[16:] == [37, 38, 39, 40]
        await one.finish(*range(4, 20))
        assert one.requests[20:] == [41, 42]


async def test_engines_share_the_memory(rig: Rig) -> None:
    """Else the first would take it, and the others run one long line at a time."""
    lines = [RawLine(number, b"x" * 100) for number in range(1, 43)]
    async with fed_by_hand(rig, *lines, max_held_bytes=1_200) as (one, other):
        assert [len(one.requests), len(other.requests)] == [6, 6]


def children(process: Process) -> list[int]:
    """Return the processes of a worker's engines."""
    task = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children")
    return [int(child) for child in task.read_text(encoding="ascii").split()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine has a core")
def test_an_engine_process_that_is_killed_is_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines run again alongside those of the other one; SIGTERM then ends the worker with 0."""
    monkeypatch.setenv(COLD_VARIABLE, "1")  # otherwise it has one more child
    work = rig.batch(*[{"wait": 2}] * 8, *[GOOD] * 16)
    process = rig.start("--data-parallel-size", 2, "--max-inflight", 4)
    wait_for(lambda: len(children(process)) == 2 and len(process.requests()) >= 8)
    victim = children(process)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: work.is_done, lambda: process.log)
    assert work.ids() == names(*range(1, 25))
    assert work.shard().fence == 1
    wait_for(lambda: len(process.events("engine ready")) == 3)
    assert {event["engine"] for event in process.events("engine ready")} == {1, 2}
    assert victim not in children(process)
    process.send(signal.SIGTERM)
    assert process.wait() == 0
