"""A worker in this process on an emulator: from messages to commits, with all that can go wrong."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.emulators import MODEL
from tests.handler.worker.fakes import FakeEngine, QuickAws
from tests.handler.worker.rig import NEVER, PATIENCE_SECONDS, Rig, Work, until
from tidemill.batch.file.expected_tokens import ExpectedTokens
from tidemill.batch.file.lines import MAX_LINE_BYTES
from tidemill.batch.model import EngineInfo
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.engine_process.deaths import MAX_FAILED_STARTS
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.stores.usage import EVERYBODY
from tidemill.handler.worker import engine_restarts
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.shard import shard_input
from tidemill.handler.worker.worker import Worker
from tidemill.protocol.contract import EngineStats

GOOD: dict[str, Any] = {}


def advance(work: Work) -> dict[str, Any]:
    """Return the message that rings for a batch."""
    return {"kind": "advance", "batch_id": work.id}


async def test_every_line_gets_its_row_in_order(rig: Rig) -> None:
    """The order of finishing does not matter; failures are separate, blank lines have no row."""
    bodies: list[Any] = [{"wait": n % 7 / 100, "status": 400 if n == 3 else 200} for n in range(20)]
    bodies[5:5] = [b"\n", b"  \r\n", b"{\n"]
    work = rig.batch(*bodies, shard_lines=6)
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    assert running.status == 0
    expected = [f"c{n}" for n in range(1, len(bodies) + 1) if n not in {4, 6, 7, 8}]
    assert work.ids() == expected
    assert work.ids("errors") == ["c4", None]
    rung = rig.messages()
    assert rung == [advance(work)] * len(rung) != []  # once for each that was among the last
    assert rig.messages(rig.queue) == []


async def test_a_long_shard_is_read_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that span two pieces are whole."""
    monkeypatch.setattr(shard_input, "_READ_BYTES", 50)
    work = rig.batch(*[{"text": "é" * n} for n in range(30)], shard_lines=12)
    async with rig.worker():
        await until(lambda: work.is_done)
    echoed = [row["response"]["body"]["echo"]["text"] for row in work.sealed()]
    assert echoed == ["é" * n for n in range(30)]


async def test_a_line_that_is_too_long_is_answered_without_the_engine(rig: Rig) -> None:
    """It passes any shard's limit; neither it nor its neighbours are lost."""
    work = rig.batch(GOOD, {"text": "x" * MAX_LINE_BYTES}, GOOD)
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    assert running.engine.requests == ["c1", "c3"]
    assert work.ids() == ["c1", "c3"]
    [row] = work.sealed("errors")
    assert row["error"]["line"] == 2
    assert "too long" in row["error"]["message"]


async def test_progress_and_cost_are_recorded(rig: Rig) -> None:
    """Rows, tokens and the time of its GPU; nothing is recent when all is done."""
    work = rig.batch({"wait": 0.5}, {"status": 500}, b"{\n")
    async with rig.worker(tick_seconds=0.1):
        await until(lambda: work.is_done)
    shard = work.shard()
    done = shard.progress
    assert (done.completed, done.failed) == (1, 2)
    assert (done.prompt_tokens, done.cached_tokens, done.completion_tokens) == (10, 4, 3)
    assert 0 < done.gpu_seconds < 60
    assert done.expected == shard.expected == ExpectedTokens(len(b"".join(work.lines)), 300)
    for tenant in ("owner", EVERYBODY):
        spent = rig.run(rig.deployment.usage.gpu_seconds_today(tenant, time.time()))
        assert spent == pytest.approx(done.gpu_seconds, abs=0.01)
    assert done.rows_per_second == 0
    assert shard.owner is None
    assert work.batch.engine == EngineInfo("r1", "test", labels_spans=True)


async def test_audio_that_was_heard_is_recorded(rig: Rig) -> None:
    """It is recorded in seconds, also of a recording with a fraction of a second."""
    work = rig.batch({"hear": 12.5}, {"hear": 0.25}, GOOD, {"status": 500, "hear": 9.0})
    async with rig.worker():
        await until(lambda: work.is_done)
    assert work.shard().progress.audio_seconds == 12.75


async def test_a_batch_keeps_its_pace_from_shard_to_shard(rig: Rig) -> None:
    """Rows of a shard in the last minute count for the next shard when the first has ended."""
    work = rig.batch({"wait": 2}, GOOD, {"wait": NEVER}, shard_lines=2)
    async with rig.worker():
        await until(lambda: work.shard(1).progress.rows_per_second)
        assert work.shard(0).owner is None
        assert work.shard(1).progress.num_rows == 0


async def test_the_engine_does_not_drain_between_shards(rig: Rig) -> None:
    """While a slow line holds one shard, other shards' lines run concurrently, up to a limit."""
    works = [rig.batch({"wait": NEVER, "custom_id": f"slow-{n}"}, GOOD) for n in range(5)]
    async with rig.worker(max_shards=4) as running:
        await until(lambda: len(running.engine.requests) == 8)
        await until(lambda: all(work.index().lines == {2} for work in works if work.shard().owner))
        assert sum(work.shard().owner is not None for work in works) == 4
        assert len(running.engine.inside) == 4


async def test_a_full_engine_takes_no_further_shard(rig: Rig) -> None:
    """No other worker could run the lines that wait here."""
    work = rig.batch(*[{"wait": NEVER}] * 8, shard_lines=4)
    async with rig.worker(max_inflight=2) as running:
        await until(lambda: len(running.engine.requests) == 2)
        await asyncio.sleep(0.5)
        assert [work.shard(n).owner is None for n in (0, 1)] in ([True, False], [False, True])
        assert len(running.engine.inside) == 2


async def test_held_bytes_are_bounded(rig: Rig) -> None:
    """The bound excludes one request that may exceed all of it."""
    work = rig.batch(*[{"text": "x" * 1_000, "wait": 0.01}] * 20)
    async with rig.worker(max_held_bytes=2_500) as running:
        await until(lambda: work.is_done)
    assert max(map(len, running.engine.company)) == 3
    work = rig.batch(*[{"text": "x" * 5_000}] * 3)
    async with rig.worker(max_held_bytes=2_500, flush_seconds=0.01) as running:
        await until(lambda: work.is_done)
    assert max(map(len, running.engine.company)) == 1


async def test_durable_rows_are_not_computed_again(rig: Rig) -> None:
    """A worker that takes a shard over runs only what has no row; its own rows come after."""
    work = rig.batch(*[GOOD] * 4, {"wait": NEVER}, GOOD)
    async with rig.worker() as first:
        await until(lambda: len(work.index()) == 5)
    assert first.status == 0
    assert work.is_free
    changed = work.shard()
    assert (changed.fence, changed.attempts, changed.progress.completed) == (1, 0, 5)
    assert changed.suspects == ()
    async with rig.worker() as second:
        await until(lambda: second.engine.requests)
    assert second.engine.requests == ["c5"]
    assert work.shard().progress.completed == 5


async def test_a_stop_gives_requests_their_grace(rig: Rig) -> None:
    """Requests that finish in it are committed; no other is begun."""
    work = rig.batch({"wait": 0.5}, GOOD)
    async with rig.worker(max_inflight=1, grace_seconds=30) as running:
        await until(lambda: running.engine.requests)
    assert running.engine.requests == ["c1"]
    assert work.index().lines == {1}
    assert rig.messages(rig.queue) == [{"batch_id": work.id, "shard": 0}]
    whole = rig.batch({"wait": 0.5})
    async with rig.worker(grace_seconds=30) as running:
        await until(lambda: running.engine.requests)
    assert whole.is_done


async def test_a_stop_before_the_model_is_loaded_ends_at_once(rig: Rig) -> None:
    """No message has been taken then."""
    rig.batch(GOOD)
    engine = FakeEngine(load_seconds=NEVER)
    async with rig.worker(engine=engine) as running:
        await until(lambda: engine.num_lives)
    assert running.status == 0
    assert len(rig.messages(rig.queue)) == 1


async def test_an_idle_worker_ends_if_configured(rig: Rig) -> None:
    """It ends after its work, with 0."""
    work = rig.batch(GOOD)
    async with rig.worker(exit_when_idle_seconds=1) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 0
    assert work.is_done


async def test_work_that_is_there_is_done_before_it_may_be_idle(rig: Rig) -> None:
    """A worker without an idle time still looks for work once."""
    work = rig.batch(GOOD)
    async with rig.worker(exit_when_idle_seconds=0) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 0
    assert work.is_done


async def test_messages_that_ring_for_nothing_keep_no_worker(rig: Rig) -> None:
    """Messages of another worker's shard come back as long as it runs: they are not work."""
    work = rig.batch(GOOD, rings=False)
    shard = work.claim()
    rig.run(
        rig.deployment.table.commit(shard, progress=Progress(), output_sizes=(), error_sizes=())
    )
    num_looks = 0

    class Ringing(QuickAws):
        async def _send(self, call: Call) -> Any:
            nonlocal num_looks
            if call.method == "receive_message":
                num_looks += 1
                if num_looks % 2:
                    work.ring(0)
                if num_looks == 40:
                    worker.stop()
            return await super()._send(call)

    async with Ringing() as aws:
        config = rig.config(exit_when_idle_seconds=5)
        context = WorkerContext(
            aws, rig.deployment, rig.queue, config, clock=lambda: float(num_looks)
        )
        worker = Worker(context, FakeEngine().new_life)
        assert await worker.run() == 0
    assert num_looks == 6


@pytest.mark.parametrize(
    ("hours", "is_taken", "stays"),
    [("", False, True), ("", True, False), ("Mon-Sat 00:00-24:00", False, False)],
)
async def test_an_idle_worker_stays_if_it_is_one_of_those_that_shall(
    rig: Rig, hours: str, *, is_taken: bool, stays: bool
) -> None:
    """One whose place another has goes, and all do outside of the hours."""
    num_looks, sunday = 0, 1_672_531_200
    if is_taken:
        fleets = rig.deployment.fleets
        keep = fleets.keep_ready(MODEL, 1, "other", now=sunday, until=sunday + 600)
        assert rig.run(keep)

    class Looking(QuickAws):
        async def _send(self, call: Call) -> Any:
            nonlocal num_looks
            if call.method == "receive_message":
                num_looks += 1
                if num_looks == 40:
                    worker.stop()
            return await super()._send(call)

    async with Looking() as aws:
        config = rig.config(exit_when_idle_seconds=5, min_workers=1, min_workers_hours=hours)
        context = WorkerContext(
            aws,
            rig.deployment,
            rig.queue,
            config,
            wall=lambda: float(sunday),
            clock=lambda: float(num_looks),
        )
        worker = Worker(context, FakeEngine().new_life)
        assert await worker.run() == 0
    assert num_looks == (40 if stays else 5)


# The end of a batch


@pytest.mark.parametrize("status", [Status.CANCELLING, Status.FINALIZING])
async def test_a_batch_that_ends_is_run_no_further(rig: Rig, status: Status) -> None:
    """Finished rows are kept, requests taken back, and others are let in."""
    work = rig.batch(GOOD, {"wait": NEVER}, {"wait": NEVER})
    async with rig.worker(flush_seconds=NEVER) as running:
        await until(lambda: len(running.engine.inside) == 2)
        work.move(status)
        await until(lambda: work.is_free)
        assert not running.engine.inside
        assert work.index().lines == {1}
        assert work.shard().attempts == 0
        other = rig.batch(GOOD)
        await until(lambda: other.is_done)
    assert advance(work) in rig.messages()
    assert rig.messages(rig.queue) == []


async def test_a_batch_that_expires_is_run_no_further(rig: Rig) -> None:
    """The worker sees it by itself, however long it took until its lines run."""
    work = rig.batch(GOOD, {"wait": NEVER})
    async with rig.worker() as running:
        await until(lambda: len(running.engine.requests) == 2)
        table = rig.deployment.table
        rig.run(table.change_batch(work.id, Status.IN_PROGRESS, expires_at=int(time.time())))
        await until(lambda: work.is_free)
    assert work.index().lines == {1}
    assert rig.messages() == [advance(work)]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_an_input_that_is_gone_fails_the_batch(rig: Rig, how: str) -> None:
    """The batch has the reason, and gets a message instead of its shard."""
    work = rig.batch(GOOD, GOOD)
    client = rig.aws.clients["s3"]
    source = work.batch.source
    where = {"Bucket": source.bucket, "Key": source.key}
    client.delete_object(**where, VersionId=source.version_id)
    if how == "replaced":
        client.put_object(**where, Body=b"something else\n")
    async with rig.worker() as running:
        await until(lambda: work.batch.status is Status.FINALIZING and work.is_free)
    assert running.engine.requests == []
    batch = work.batch
    assert batch.outcome is Status.FAILED
    assert [error.code for error in batch.errors] == ["input_changed"]
    assert batch.num_errors == 1
    assert rig.messages() == [advance(work)]
    assert rig.messages(rig.queue) == []


async def test_lines_that_were_not_counted_are_another_input(rig: Rig) -> None:
    """A shard whose bytes hold another number of lines is never committed."""
    work = rig.batch(GOOD, GOOD, rings=False)
    table = rig.deployment.table
    key = {"pk": f"BATCH#{work.id}", "sk": "SHARD#0000000"}
    rig.run(table.update(key, {"num_rows": 3}, "attribute_exists(pk)", {}))
    work.ring()
    async with rig.worker():
        await until(lambda: work.batch.status is Status.FINALIZING)


# An engine that dies


async def test_a_poisonous_line_is_found_and_the_others_get_their_rows(rig: Rig) -> None:
    """It dies alone, after being a suspect; its row has the reason; the rest is as ever."""
    bodies: list[Any] = [GOOD] * 30
    bodies[17] = {"die": 1, "wait": 0.05}
    work = rig.batch(*bodies, shard_lines=16)
    async with rig.worker() as running:
        await until(lambda: work.is_done)
    assert running.status == 0
    assert work.ids() == [f"c{n}" for n in range(1, 31) if n != 18]
    [row] = work.sealed("errors")
    assert row["custom_id"] == "c18"
    assert row["response"]["status_code"] == 500
    assert row["response"]["body"]["error"]["code"] == "engine_killed"
    assert running.engine.requests.count("c18") > 1
    assert work.shard(1).quarantined == (18,)
    assert rig.messages(rig.queue) == []


async def test_the_first_death_of_one_line_makes_it_a_suspect_only(rig: Rig) -> None:
    """It may have been the machine; the second time it is the line."""
    work = rig.batch({"die": 1})
    async with rig.worker(engine=FakeEngine(refuses_after=1)) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    shard = work.shard()
    assert (shard.suspects, shard.quarantined, shard.owner) == (((1,),), (), None)
    assert rig.messages(rig.queue) == [{"batch_id": work.id, "shard": 0}]
    work.ring()
    async with rig.worker(engine=FakeEngine(refuses_after=1)) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    shard = work.shard()
    assert (shard.suspects, shard.quarantined, shard.attempts) == ((), (1,), 0)


async def test_a_death_keeps_what_was_finished(rig: Rig) -> None:
    """Rows are stored before their flush was due; each of two shards keeps its own suspects."""
    works = [rig.batch(GOOD, {"wait": NEVER}, GOOD), rig.batch(GOOD, {"die": 1, "wait": 0.5})]
    async with rig.worker(engine=FakeEngine(refuses_after=1), flush_seconds=NEVER) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert [work.index().lines for work in works] == [{1, 3}, {1}]
    assert [work.shard().suspects for work in works] == [((2,),), ((2,),)]


async def test_suspects_run_alone(rig: Rig) -> None:
    """Neither another shard's lines nor other lines of their shard run in the meantime."""
    work = rig.batch(*[{"wait": 0.05}] * 8, rings=False)
    claimed = work.claim()
    suspects = ((2, 3, 4), (6,))
    rig.run(
        rig.deployment.table.release(
            claimed, progress=claimed.progress, suspects=suspects, quarantined=(), attempts=0
        )
    )
    other = rig.batch({"wait": 0.3, "custom_id": "other"})
    work.ring()
    async with rig.worker() as running:
        await until(lambda: work.is_done and other.is_done)
    with_suspects = [some for some in running.engine.company if some & {"c2", "c3", "c4", "c6"}]
    assert max(with_suspects, key=len) == {"c2", "c3", "c4"}
    assert all(some <= {"c2", "c3", "c4"} or some == {"c6"} for some in with_suspects)


async def test_an_engine_that_dies_of_everything_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else than a request is broken then, and restarting mends nothing."""
    monkeypatch.setattr(engine_restarts, "MAX_DEATHS_WITHOUT_ROW", 2)
    work = rig.batch(*[{"die": 1}] * 8)
    async with rig.worker() as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert running.engine.num_lives == 2
    assert work.is_free
    assert work.shard().suspects == ((1, 2, 3, 4), (5, 6, 7, 8))


def with_suspects(rig: Rig, *groups: tuple[int, ...]) -> Work:
    """Return a batch of eight lines of which some ran when an engine died elsewhere."""
    work = rig.batch(*[GOOD] * 8, rings=False)
    claimed = work.claim()
    rig.run(
        rig.deployment.table.release(
            claimed, progress=claimed.progress, suspects=groups, quarantined=(), attempts=0
        )
    )
    work.ring()
    return work


KNOWN = ("/v1/completions",)


@pytest.mark.parametrize("groups", [((3, 4), (6,)), ((6,),)], ids=["several", "the last step"])
async def test_a_broken_machine_blames_no_line(rig: Rig, groups: tuple[tuple[int, ...]]) -> None:
    """It dies of a line that any can run: the suspects are as they were, for another machine."""
    work = with_suspects(rig, *groups)
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN, is_broken=True)) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert running.engine.requests == ["known"]
    shard = work.shard()
    assert (shard.suspects, shard.quarantined) == (groups, ())
    assert (shard.owner, shard.attempts) == (None, 0)
    work.ring()
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN)) as running:
        await until(lambda: work.is_done)
    assert work.ids() == [f"c{n}" for n in range(1, 9)]


async def test_a_machine_that_its_engine_calls_broken_blames_no_line(rig: Rig) -> None:
    """Its lines are not suspects, and the worker ends with it."""
    engine = FakeEngine(endpoints=KNOWN)
    engine.says_broken = True
    work = rig.batch(GOOD, {"die": True})
    async with rig.worker(engine=engine) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert (engine.num_lives, work.shard().suspects, work.shard().quarantined) == (1, (), ())


async def test_a_machine_that_breaks_is_found_at_its_second_death(rig: Rig) -> None:
    """The first makes its lines suspects, which no third machine ever quarantines."""
    engine = FakeEngine(endpoints=KNOWN)
    async with rig.worker(engine=engine) as running:
        await until(lambda: engine.requests and not engine.inside)
        engine.is_broken = True
        work = rig.batch(*[GOOD] * 4)
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert engine.num_lives == 2
    assert engine.requests.count("known") == 2
    assert engine.requests[-1] == "known"
    assert (work.shard().suspects, work.shard().quarantined) == (((1, 2, 3, 4),), ())


@pytest.mark.parametrize("fault", [{"is_broken": True}, {"known_status": 500}], ids=str)
async def test_a_machine_that_is_broken_runs_no_line(rig: Rig, fault: dict[str, Any]) -> None:
    """Its first engine dies of a line of ours, or fails it: lines are as they were."""
    work = rig.batch(*[GOOD] * 4)
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN, **fault)) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert running.engine.requests == ["known"]
    assert (work.shard().suspects, work.shard().quarantined) == ((), ())


async def test_a_machine_proves_itself_once_a_life(rig: Rig) -> None:
    """The check runs alone and before any line."""
    first, second = with_suspects(rig, (3, 4), (6,)), rig.batch(GOOD, {"die": 1}, GOOD)
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN)) as running:
        await until(lambda: first.is_done and second.is_done)
    assert running.engine.requests.count("known") == running.engine.num_lives
    assert running.engine.requests[0] == "known"
    assert [one for one in running.engine.company if "known" in one] == [
        frozenset({"known"})
    ] * running.engine.num_lives


async def test_rows_are_not_kept_of_a_machine_that_failed_and_is_not_well(rig: Rig) -> None:
    """A step failed and passed, and then a known line fails: another machine runs these lines."""
    engine = FakeEngine(endpoints=KNOWN)
    async with rig.worker(engine=engine) as running:
        await until(lambda: engine.requests and not engine.inside)
        engine.stats, engine.known_status = EngineStats(failures=1), 500
        work = rig.batch(*[GOOD] * 4)
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    shard = work.shard()
    assert (shard.suspects, shard.quarantined, shard.owner) == ((), (), None)
    assert shard.progress.completed == 0
    work.ring()
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN)):
        await until(lambda: work.is_done)
    assert work.ids() == [f"c{n}" for n in range(1, 5)]


async def test_rows_are_kept_of_a_machine_that_failed_and_is_well(rig: Rig) -> None:
    """The known line succeeds once for each failure."""
    engine = FakeEngine(endpoints=KNOWN)
    async with rig.worker(engine=engine):
        await until(lambda: engine.requests and not engine.inside)
        engine.stats = EngineStats(failures=1)
        for _ in range(2):
            work = rig.batch(*[GOOD] * 4)
            await until(lambda work=work: work.is_done)
    assert engine.requests.count("known") == 2


async def test_a_line_that_a_model_refuses_proves_nothing_and_costs_nothing(rig: Rig) -> None:
    """It is this model's way, not the machine's."""
    work = rig.batch(GOOD)
    async with rig.worker(engine=FakeEngine(endpoints=KNOWN, known_status=400)):
        await until(lambda: work.is_done)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker wait between two starts for a moment only."""
    monkeypatch.setattr(engine_restarts, "MAX_BACKOFF_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_dies_while_it_starts_is_started_again(rig: Rig) -> None:
    """The cause may have gone: another process's memory, or a driver that was not ready."""
    work = rig.batch(GOOD)
    async with rig.worker(engine=FakeEngine(stillborn={1, 2})) as running:
        await until(lambda: work.is_done)
    assert (running.status, running.engine.num_lives) == (0, 3)


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_never_comes_up_is_given_up(rig: Rig) -> None:
    """It is given up after the documented number of deaths, before a message is received."""
    rig.batch(GOOD)
    async with rig.worker(engine=FakeEngine(stillborn=range(1, 100))) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert running.engine.num_lives == MAX_FAILED_STARTS
    assert len(rig.messages(rig.queue)) == 1


async def test_a_worker_is_stopped_while_its_engine_waits_to_start_again(rig: Rig) -> None:
    """It ends at once, with 0."""
    async with rig.worker(engine=FakeEngine(stillborn={1})) as running:
        await until(lambda: running.engine.num_lives == 1)
    assert (running.status, running.engine.num_lives) == (0, 1)


async def test_an_engine_that_cannot_start_ends_the_worker(rig: Rig) -> None:
    """The exit status is 1, before a message is received."""
    rig.batch(GOOD)
    async with rig.worker(engine=FakeEngine(refuses_after=0)) as running:
        assert await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_SECONDS) == 1
    assert len(rig.messages(rig.queue)) == 1
