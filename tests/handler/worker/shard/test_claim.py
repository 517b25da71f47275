"""Handling of each message: a claim, or the reason why there is none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from tests.emulators import MODEL
from tests.handler.worker.rig import Rig, Work, well
from tidemill.batch.escalation import Escalation
from tidemill.batch.model import EngineInfo, ShardStatus
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.aws.aio import AioAws
from tidemill.handler.aws.queues import Message, shard_message
from tidemill.handler.aws.stores.overview import Overview
from tidemill.handler.errors import AwsError
from tidemill.handler.worker.context.context import WorkerContext
from tidemill.handler.worker.context.precedence import FreshShard, Precedence
from tidemill.handler.worker.shard.claim import Claim, claim_shard, note_engine
from tidemill.handler.worker.shard.line_order import LineOrder
from tidemill.handler.worker.shard.message import ShardMessage, ShardTarget, parse_target
from tidemill.handler.worker.shard.shard_run import ShardRun

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
            aws, rig.deployment, rig.queue, rig.config(lease_seconds=2), clock=Clock()
        )


async def take(context: WorkerContext) -> ShardMessage:
    """Receive the one message that is there."""
    [message] = await context.aws.run(context.queue.receive(visibility_seconds=30))
    return ShardMessage(context, message)


async def claim(context: WorkerContext) -> Claim | None:
    """Claim what the one message rings for."""
    return await claim_shard(context, await take(context), owner="me")


def advance(work: Work) -> dict[str, Any]:
    """Return the message that rings for a batch."""
    return {"kind": "advance", "batch_id": work.id}


async def num_hidden(context: WorkerContext) -> int:
    """Return about how many messages there are, seen or not."""
    return await context.aws.run(context.queue.count())


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        '{"batch_id": "b"}',
        '{"batch_id": 1, "shard": 1}',
        '{"batch_id": "b", "shard": -1}',
        '{"batch_id": "", "shard": 1}',
        '{"Event": "s3:TestEvent"}',
    ],
)
def test_nonsense_rings_for_nothing(body: str) -> None:
    """No malformed message leads to a claim."""
    assert parse_target(body) is None


def test_a_message_rings_for_one_shard() -> None:
    """More fields do no harm."""
    assert parse_target('{"batch_id": "b", "shard": 3, "x": 1}') == ShardTarget("b", 3)


async def test_a_free_shard_is_claimed(rig: Rig, context: WorkerContext) -> None:
    """It gets a new fencing token; the message stays hidden."""
    work = rig.batch(GOOD)
    before = time.time()
    claimed = await claim(context)
    after = time.time()
    assert claimed is not None
    assert (claimed.shard, claimed.batch, claimed.sent_at) == (work.shard(), work.batch, 1_000)
    shard = work.shard()
    assert (shard.owner, shard.fence, shard.attempts) == ("me", 1, 1)
    assert before <= (shard.lease_until or 0) - 2 <= after
    assert await num_hidden(context) == 1


@pytest.mark.parametrize("body", [{"x": 1}, {"batch_id": "batch_unknown", "shard": 0}])
async def test_a_message_without_a_shard_is_dropped(
    rig: Rig, context: WorkerContext, body: dict[str, object]
) -> None:
    """It would come again and again."""
    rig.run(rig.queue.send(body, group=None))
    assert await claim(context) is None
    assert await num_hidden(context) == 0


async def test_a_message_for_a_done_shard_is_dropped(rig: Rig, context: WorkerContext) -> None:
    """The batch gets a message if that was its last shard: its committer may have died."""
    work = rig.batch(GOOD, GOOD, shard_lines=1, rings=False)
    for number in (0, 1):
        shard = work.claim(number)
        rig.run(
            rig.deployment.table.commit(shard, progress=Progress(), output_sizes=(), error_sizes=())
        )
        work.ring(number)
        assert await claim(context) is None
        assert await num_hidden(context) == 0
        assert rig.messages() == ([advance(work)] if number else [])
        assert work.shard(number).status is ShardStatus.DONE


async def test_a_shard_that_another_has_is_looked_at_when_its_lease_ends(
    rig: Rig, context: WorkerContext
) -> None:
    """A fresh message comes then, so that no failure is counted."""
    work = rig.batch(GOOD)
    other = work.claim(lease_seconds=1)
    assert await claim(context) is None
    assert work.shard() == other
    assert await num_hidden(context) == 1
    [message] = await context.aws.run(context.queue.receive(wait_seconds=15, visibility_seconds=30))
    assert parse_target(message.body) == ShardTarget(work.id, 0)
    assert time.time() > other.lease_until - 0.5


@pytest.mark.parametrize("status", [Status.CANCELLING, Status.FINALIZING])
async def test_a_batch_that_winds_up_is_not_run(
    rig: Rig, context: WorkerContext, status: Status
) -> None:
    """Its shard is given back at once, and no attempt counted."""
    work = rig.batch(GOOD)
    work.move(status)
    assert await claim(context) is None
    shard = work.shard()
    assert (shard.owner, shard.attempts, shard.abandoned) == (None, 0, None)
    assert rig.messages() == [advance(work)]
    assert await num_hidden(context) == 0


@pytest.mark.parametrize("status", [Status.CANCELLING, Status.FINALIZING])
async def test_the_other_messages_of_a_batch_that_winds_up_cost_nothing(
    rig: Rig, context: WorkerContext, status: Status
) -> None:
    """Its shards are as if never claimed, and its batch gets one message."""
    work = rig.batch(GOOD, GOOD, shard_lines=1, rings=False)
    work.move(status)
    for number in (0, 1):
        work.ring(number)
        assert await claim(context) is None
        assert await num_hidden(context) == 0
    assert (work.shard(0).fence, work.shard(1).fence) == (1, 0)
    assert rig.messages() == [advance(work)]


async def test_a_name_is_free_when_its_batch_is_forgotten(rig: Rig, context: WorkerContext) -> None:
    """Another of that name may run."""
    work = rig.batch(GOOD)
    context.ended_batches[work.id] = context.wall() - 1
    assert await claim(context) is not None


async def test_a_batch_past_its_window_is_not_run(rig: Rig, context: WorkerContext) -> None:
    """It does not matter whether a run has already moved it."""
    work = rig.batch(GOOD, expires_in_seconds=-1)
    assert await claim(context) is None
    assert work.is_free
    assert rig.messages() == [advance(work)]


async def test_a_shard_of_an_unknown_batch_is_not_run(rig: Rig, context: WorkerContext) -> None:
    """It can be had, but there is nothing to run it for."""
    work = rig.batch(GOOD)
    key = {"pk": {"S": f"BATCH#{work.id}"}, "sk": {"S": "META"}}
    rig.aws.clients["dynamodb"].delete_item(TableName=rig.deployment.table.name, Key=key)
    assert await claim(context) is None
    assert await num_hidden(context) == 0


async def test_a_shard_that_was_given_up_is_not_run(rig: Rig, context: WorkerContext) -> None:
    """The batch is rung for, which gives its lines their rows."""
    work = rig.batch(GOOD)
    work.claim(lease_seconds=-1)
    rig.run(rig.deployment.table.abandon(work.id, 0, "Why not."))
    assert await claim(context) is None
    assert (work.shard().owner, work.shard().abandoned) == (None, "Why not.")
    assert rig.messages() == [advance(work)]


async def test_a_shard_whose_claims_come_to_nothing_is_given_up(
    rig: Rig, context: WorkerContext
) -> None:
    """After that many, it is given up with the reason; with one less it is tried once more."""
    work = rig.batch(GOOD, rings=False)
    for _ in range(4):
        work.claim(lease_seconds=-1)
    work.ring()
    assert await claim(context) is not None
    assert work.shard().attempts == 5
    other = rig.batch(GOOD, rings=False)
    for _ in range(5):
        other.claim(lease_seconds=-1)
    other.ring()
    assert await claim(context) is None
    shard = other.shard()
    assert shard.abandoned == "The shard was given up: no new row in 5 attempts."
    assert shard.owner is None
    assert rig.messages() == [advance(other)]


async def test_the_first_engine_of_a_batch_is_noted(rig: Rig, context: WorkerContext) -> None:
    """A later one does not take its place."""
    work = rig.batch(GOOD)
    await note_engine(context, work.batch, EngineInfo("r1", "1.0"))
    await note_engine(context, work.batch, EngineInfo("r2", "2.0"))
    assert work.batch.engine == EngineInfo("r1", "1.0")


# Doorbells


async def test_a_message_is_kept_when_that_is_due(rig: Rig, context: WorkerContext) -> None:
    """It is not renewed at every beat, but after a third of its visibility timeout."""
    rig.batch(GOOD)
    hidden = []
    doorbell = await take(spying(context, hidden))
    for now in (1_000, 1_001.9, 1_002, 1_003, 1_004):
        doorbell._context.clock.now = now  # type: ignore[attr-defined]
        await doorbell.extend_visibility()
    assert hidden == [1_002, 1_004]


def spying(context: WorkerContext, hidden: list[float]) -> WorkerContext:
    """Return the site with note taken of when a message is hidden."""

    class Spy:
        async def run(self, operation: Any) -> Any:
            if operation.__name__ == "hide":
                hidden.append(context.clock())
            return await context.aws.run(operation)

    return replace(context, aws=Spy())


async def test_a_message_that_is_held_for_very_long_is_replaced(
    rig: Rig, context: WorkerContext
) -> None:
    """SQS would hand it to another after twelve hours; the copy is taken over when it comes."""
    work = rig.batch(GOOD)
    doorbell = await take(context)
    context.clock.now += 11 * 3600  # type: ignore[attr-defined]
    await doorbell.extend_visibility()
    assert not doorbell.is_held
    assert await num_hidden(context) == 1
    await doorbell.extend_visibility()
    await doorbell.delete()
    assert await num_hidden(context) == 1
    work.ring()
    await doorbell.take_over(await take(context))
    assert doorbell.is_held
    await doorbell.delete()
    assert await num_hidden(context) == 1


async def test_a_second_message_for_a_held_shard_is_dismissed(
    rig: Rig, context: WorkerContext
) -> None:
    """One is enough."""
    work = rig.batch(GOOD)
    first = await take(context)
    work.ring()
    await first.take_over(await take(context))
    assert first.is_held
    assert await num_hidden(context) == 1


async def test_a_message_in_the_place_of_another_is_for_the_same_tenant(
    rig: Rig, context: WorkerContext
) -> None:
    """A shard that is handed over waits among its tenant's own."""
    body = shard_message(rig.batch(GOOD).id, 0)
    await (await take(context)).delete()
    await context.aws.run(context.queue.send(body, group="search"))
    await (await take(context)).resend()
    [message] = await context.aws.run(context.queue.receive(visibility_seconds=30))
    assert message.group == "search"


async def test_a_message_that_is_already_deleted_is_not_an_error(
    rig: Rig, context: WorkerContext
) -> None:
    """Neither renewing nor deleting it fails."""
    rig.batch(GOOD)
    doorbell = await take(context)
    assert doorbell._message is not None
    other = ShardMessage(context, Message(doorbell._message.body, doorbell._message.receipt))
    await other.delete()
    context.clock.now += 60  # type: ignore[attr-defined]
    await doorbell.extend_visibility()
    await doorbell.delete()
    assert await num_hidden(context) == 0
    assert doorbell.target is not None
    assert doorbell.labels == doorbell.target._asdict()


async def test_a_shard_that_finalize_takes_meanwhile_is_left_to_it(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is stolen between the claim and its release, the message goes, and no worker stops."""
    work = rig.batch(GOOD)

    def stolen(*_: object) -> str:
        rig.run(
            rig.deployment.table.claim(
                work.id, 0, owner="finalize", now=time.time(), lease_seconds=60, steal=True
            )
        )
        return "the batch is cancelling"

    monkeypatch.setattr("tidemill.handler.worker.shard.claim.skip_reason", stolen)
    assert await claim(context) is None
    assert work.shard().owner == "finalize"
    assert await num_hidden(context) == 0


@pytest.mark.parametrize(("left", "delay"), [(1000, 900), (500, 500)])
async def test_messages_of_a_paused_batch_are_put_off(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch, left: int, delay: int
) -> None:
    """They wait for a nearby end of the pause; only the first costs a claim, and no try is used."""
    work = rig.batch(GOOD, GOOD, shard_lines=1, rings=False)
    now = int(time.time())
    pause = {"code": "budget_used_up", "message": "m", "since": now, "until": now + left}
    rig.run(rig.deployment.table.change_batch(work.id, Status.IN_PROGRESS, pause=pause))
    paused = replace(context, wall=lambda: float(now))
    delays: list[float] = []
    send = type(context.queue).send

    def note(queue: Any, body: Any, *, group: str | None, delay_seconds: float = 0) -> Any:
        delays.append(delay_seconds)
        return send(queue, body, group=group)

    monkeypatch.setattr(type(context.queue), "send", note)
    for number in (0, 1):
        await context.aws.run(send(context.queue, shard_message(work.id, number), group="t"))
        assert await claim(paused) is None
        [again] = await context.aws.run(context.queue.receive(visibility_seconds=30))
        assert again.group == "t"
    assert delays == [delay, delay]
    assert [work.shard(n).fence for n in (0, 1)] == [1, 0]
    assert all(work.shard(n).attempts == 0 for n in (0, 1))
    assert work.is_free
    later = replace(context, wall=lambda: now + left + 1.0)
    work.ring(1)
    assert await claim(later)


async def claim_for(
    context: WorkerContext, work: Work, shard: int = 0, *, is_prefetch: bool = False
) -> Claim | None:
    """Claim what a message of the tenant rings for, each time as another owner."""
    await context.aws.run(context.queue.send(shard_message(work.id, shard), group="owner"))
    [received] = await context.aws.run(context.queue.receive(visibility_seconds=30))
    message = ShardMessage(context, received._replace(group="owner"))
    return await claim_shard(context, message, owner=uuid4().hex, is_prefetch=is_prefetch)


def claimed_of(claim: Claim | None) -> tuple[str, int]:
    """Return the batch and the number of a claimed shard."""
    assert claim is not None
    return claim.batch.id, claim.shard.number


@pytest.mark.parametrize(
    ("one", "other"),
    [({}, {"priority": -1}), ({"priority": 3}, {}), ({}, {"expires_in_seconds": 1800})],
)
async def test_a_shard_of_the_batch_that_comes_first_is_claimed(
    rig: Rig, context: WorkerContext, one: dict[str, int], other: dict[str, int]
) -> None:
    """The message is sent again; without a waiting shard of that batch its own is claimed."""
    later = rig.batch(*[GOOD] * 2, shard_lines=1, rings=False, **one)
    first = rig.batch(*[GOOD] * 2, shard_lines=1, rings=False, **other)
    first.claim(1, owner="another worker")
    claimed = await claim_for(context, later)
    assert claimed_of(claimed) == (first.id, 0)
    assert claimed is not None
    assert not claimed.message.is_held
    assert rig.messages(rig.queue) == [{"batch_id": later.id, "shard": 0}]
    assert claimed_of(await claim_for(context, later)) == (later.id, 0)
    assert (first.shard(0).fence, first.shard(1).fence) == (1, 1)
    await claimed.message.resend()
    assert rig.messages(rig.queue) == [{"batch_id": first.id, "shard": 0}]


async def test_escalated_shards_of_the_batch_that_comes_first_are_claimed(
    rig: Rig, context: WorkerContext
) -> None:
    """Shards that wait for the threshold, for no rows or for the first model are left out."""
    works = [rig.batch(*[GOOD] * 2, shard_lines=1, rings=False)]
    for escalation in (Escalation(MODEL, MODEL, 0.8), Escalation(MODEL, MODEL, target=0.9)):
        options: dict[str, Any] = {"model": "other", "priority": -1, "escalation": escalation}
        works.append(rig.batch(*[GOOD] * 3, shard_lines=1, rings=False, **options))
        for number, num_rows in ((0, 1), (1, 0)):
            release = context.deployment.table.release(
                works[-1].claim(number),
                progress=Progress(escalated=num_rows),
                suspects=(),
                quarantined=(),
                attempts=0,
                is_escalated=True,
            )
            await context.aws.run(release)
    later, first, _ = works
    claimed = await claim_for(context, later)
    assert claimed_of(claimed) == (first.id, 0)
    assert claimed is not None
    rig.messages(rig.queue)
    await claimed.message.resend()
    assert rig.messages(rig.queue) == [{"batch_id": first.id, "escalated_shard": 0}]
    assert claimed_of(await claim_for(context, later)) == (later.id, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"priority": 1},
        {"expires_in_seconds": 7200},
        {},
        {"priority": -1, "tenant": "other"},
    ],
)
async def test_a_message_is_for_its_own_shard_unless_another_batch_comes_first(
    rig: Rig, context: WorkerContext, other: dict[str, Any]
) -> None:
    """Batches of other tenants never come first: the queue decides between tenants."""
    work = rig.batch(GOOD, rings=False)
    rig.batch(GOOD, rings=False, **other)
    assert claimed_of(await claim_for(context, work)) == (work.id, 0)


async def test_a_batch_that_cannot_run_does_not_come_first(
    rig: Rig, context: WorkerContext
) -> None:
    """It has ended, is paused or waits for finalize."""
    work = rig.batch(GOOD, rings=False)
    first = rig.batch(GOOD, rings=False, priority=-1)
    first.move(Status.CANCELLING)
    assert claimed_of(await claim_for(context, work)) == (work.id, 0)


async def test_every_eighth_message_is_for_its_own_shard(rig: Rig, context: WorkerContext) -> None:
    """A batch makes progress however many shards come first."""
    work = rig.batch(*[GOOD] * 2, shard_lines=1, rings=False)
    first = rig.batch(*[GOOD] * 20, shard_lines=1, rings=False, priority=-1)
    claimed = [claimed_of(await claim_for(context, work))[0] for _ in range(8)]
    assert claimed == [first.id] * 7 + [work.id]


async def test_a_worker_without_the_order_claims_what_messages_announce(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment of an earlier version does not let workers read the order."""

    def refused(*_: object) -> Any:
        raise AwsError("AccessDeniedException")
        yield

    monkeypatch.setattr(Overview, "list_places", refused)
    work = rig.batch(GOOD, rings=False)
    rig.batch(GOOD, rings=False, priority=-1)
    assert claimed_of(await claim_for(context, work)) == (work.id, 0)


async def test_an_older_batch_with_an_earlier_deadline_comes_first(
    rig: Rig, context: WorkerContext
) -> None:
    """Its messages may be behind those of a later batch, because they were sent again."""
    first = rig.batch(GOOD, rings=False, expires_in_seconds=1800, age_seconds=60)
    later = rig.batch(GOOD, rings=False)
    assert claimed_of(await claim_for(context, later)) == (first.id, 0)
    assert claimed_of(await claim_for(context, later)) == (later.id, 0)


async def test_a_shard_whose_run_failed_waits_for_its_message(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would use up its attempts in seconds; one that was only returned is claimed."""
    later = rig.batch(*[GOOD] * 2, shard_lines=1, rings=False)
    first = rig.batch(*[GOOD] * 2, shard_lines=1, rings=False, priority=-1)
    returned = first.claim(1)
    release = rig.deployment.table.release
    rig.run(release(returned, progress=Progress(), suspects=(), quarantined=(), attempts=0))
    claims = [await claim_for(context, later) for _ in range(2)]
    assert {claimed_of(claimed) for claimed in claims} == {(first.id, 0), (first.id, 1)}

    async def fail(_: ShardRun) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ShardRun, "_open", fail)
    for claimed in claims:
        assert claimed is not None
        await ShardRun(claimed, context, LineOrder(0), lambda: None, well).work()
    assert [first.shard(number).attempts for number in (0, 1)] == [1, 1]
    assert first.is_free
    rig.messages(rig.queue)
    uninformed = replace(context, precedence=Precedence())
    assert claimed_of(await claim_for(uninformed, later)) == (later.id, 0)
    assert claimed_of(await claim_for(uninformed, first)) == (first.id, 0)


async def test_batches_that_cannot_run_here_hide_no_other(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another model, wind up or have no shard left; another model's are read once."""
    others = [rig.batch(GOOD, rings=False, priority=-9, model="other") for _ in range(4)]
    ended = [rig.batch(GOOD, rings=False, priority=-8) for _ in range(3)]
    for work in ended:
        work.move(Status.CANCELLING)
    for _ in range(3):
        rig.batch(GOOD, rings=False, priority=-7).claim()
    first = rig.batch(GOOD, rings=False, priority=-1)
    work = rig.batch(GOOD, rings=False)
    read: list[str] = []
    get_batch = type(context.deployment.table).get_batch

    def note(table: Any, batch_id: str) -> Any:
        read.append(batch_id)
        return get_batch(table, batch_id)

    monkeypatch.setattr(type(context.deployment.table), "get_batch", note)
    assert claimed_of(await claim_for(context, work)) == (first.id, 0)
    assert {each.id for each in (*others, *ended)} < set(read)
    read.clear()
    rig.messages(rig.queue)
    later = replace(context, wall=lambda: time.time() + 30)
    assert claimed_of(await claim_for(later, work)) == (work.id, 0)
    assert {each.id for each in others}.isdisjoint(read)
    assert {each.id for each in ended} < set(read)


async def test_the_order_is_read_rarely_while_nothing_comes_first(
    rig: Rig, context: WorkerContext
) -> None:
    """A batch that comes first is noticed within a minute, and its other shards within seconds."""
    work = rig.batch(GOOD, rings=False)
    precedence, now = context.precedence, time.time()

    async def found_at(seconds: float) -> FreshShard | None:
        found = {"tenant": "owner", "model": context.model, "now": now + seconds}
        return await precedence.find(context.aws, context.deployment, work.id, **found)

    assert await found_at(0) is None
    first = rig.batch(GOOD, rings=False, priority=-1)
    assert await found_at(59) is None
    assert await found_at(60) == (first.id, 0, False)
    assert await found_at(61) is None
    second = rig.batch(GOOD, rings=False, priority=-2)
    assert await found_at(74) is None
    assert await found_at(75) == (second.id, 0, False)
    precedence.drop("owner", first.id)
    assert await found_at(76) is None


async def test_shards_are_not_listed_when_workers_have_all(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing the shards of a large batch takes several reads."""

    def never(*_: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(type(context.deployment.table), "list_some_pending", never)
    work = rig.batch(GOOD, rings=False)
    rig.batch(GOOD, rings=False, priority=-1).claim()
    assert claimed_of(await claim_for(context, work)) == (work.id, 0)


async def test_prefetched_shards_belong_to_the_batch_of_the_claim_before(
    rig: Rig, context: WorkerContext
) -> None:
    """A worker prefetches from one batch only, so that a turn is a whole fill."""
    work = rig.batch(*[GOOD] * 3, shard_lines=1, rings=False)
    first = rig.batch(*[GOOD] * 30, shard_lines=1, rings=False, priority=-1)

    async def claimed(shard: int = 0, *, is_prefetch: bool) -> str:
        rig.messages(rig.queue)
        return claimed_of(await claim_for(context, work, shard, is_prefetch=is_prefetch))[0]

    for _ in range(7):
        assert await claimed(is_prefetch=False) == first.id
        assert await claimed(is_prefetch=True) == first.id
    assert await claimed(0, is_prefetch=False) == work.id
    assert await claimed(1, is_prefetch=True) == work.id
    assert await claimed(2, is_prefetch=False) == first.id


async def test_a_claimed_shard_is_released_when_the_message_cannot_be_resent(
    rig: Rig, context: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the end of its lease, and no attempt is counted."""
    work = rig.batch(GOOD, rings=False)
    first = rig.batch(GOOD, rings=False, priority=-1)

    async def refused(*_: object) -> None:
        raise AwsError("ThrottlingException")

    monkeypatch.setattr(ShardMessage, "resend", refused)
    with pytest.raises(AwsError, match="ThrottlingException"):
        await claim_for(context, work)
    shard = first.shard()
    assert (shard.owner, shard.attempts, shard.fence) == (None, 0, 1)
    assert work.shard().fence == 0


@pytest.mark.parametrize("ends", [False, True])
async def test_the_other_messages_of_a_done_batch_cost_no_reads(
    rig: Rig, context: WorkerContext, *, ends: bool
) -> None:
    """Shards that came first leave their messages in the queue, which may be thousands."""
    work = rig.batch(*[GOOD] * 4, shard_lines=1, rings=False)
    table = rig.deployment.table
    for number in range(4):
        shard = work.claim(number)
        if number == 3:  # a message of a batch with a shard left is not known to be stale
            await claim_for(context, work, 0)
            assert work.id not in context.ended_batches
        rig.run(table.commit(shard, progress=Progress(), output_sizes=(), error_sizes=()))
    if ends:
        work.move(Status.FINALIZING)
    assert await claim_for(context, work, 0) is None
    assert rig.messages() == ([] if ends else [advance(work)])
    names: list[str] = []
    for number in (1, 2, 3):
        assert await claim_for(noting(context, names), work, number) is None
    assert names == ["send", "receive", "delete"] * 3
    assert context.wall() + 60 < context.ended_batches[work.id] < context.wall() + 10**9
    assert await num_hidden(context) == 0


def noting(context: WorkerContext, names: list[str]) -> WorkerContext:
    """Return the context with note taken of its operations."""

    class Noting:
        async def run(self, operation: Any) -> Any:
            names.append(operation.__name__)
            return await context.aws.run(operation)

    return replace(context, aws=Noting())
