"""Cascades with a target accuracy: the threshold is learnt between both models, from gold rows."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import count
from operator import add
from typing import Any

import pytest
from pydantic_core import to_json

from tests.emulators import MODEL
from tests.handler.finalize.rig import plenty
from tests.handler.killing import is_killed_after
from tests.handler.worker.rig import Rig, Work, until
from tests.handler.worker.test_cascade import LARGE, QUESTION, answers, reasons, rig
from tests.long_parameters import with_long
from tidemill.batch.batch_request import DEFAULT_WINDOW
from tidemill.batch.errors import InvalidOption
from tidemill.batch.escalation import Escalation, Threshold
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.model import Conversion, ShardStatus, Source
from tidemill.batch.progress_counts import Progress
from tidemill.batch.retry_request import RetryRequest, parse_retry
from tidemill.batch.states import Status
from tidemill.handler.aws.items import dump
from tidemill.handler.aws.objects.object_file import open_object
from tidemill.handler.aws.queues import shard_message, threshold_message
from tidemill.handler.aws.stores.live import live_key
from tidemill.handler.aws.stores.table import active_name
from tidemill.handler.aws.sync import Aws
from tidemill.handler.control.advance import advance
from tidemill.handler.control.reaper import check_batch, open_work_of, read_round
from tidemill.handler.finalize import close
from tidemill.handler.finalize.close import close_settled
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.fleet.open_batches import read_batches
from tidemill.handler.intake import threshold
from tidemill.handler.intake.threshold import learn_threshold
from tidemill.handler.lambdas.intake import handle_message
from tidemill.handler.queries.batch_view import describe_batch

__all__ = ["rig"]

RECIPE = {
    "ask": "good: Is it good?",
    "prompt": "{{ text }}",
    "gold": "known",
    "escalate": LARGE,
    "target_accuracy": 0.9,
}
SURE, UNSURE = 0.9, 0.6
GOLD = [*["yes"] * 10, "no", "no"]
"""Known answers to the first rows: the small model is sure of the ten that it gets right."""


def table_work(rig: Rig) -> Work:
    """Return a batch of 14 decisions about a table in two shards; the last two are not gold."""
    shares = [*[SURE] * 10, UNSURE, UNSURE, SURE, UNSURE]
    lines = [
        to_json(
            {
                "custom_id": f"c{number}",
                "url": "/v1/decisions",
                "body": {
                    "input": "x",
                    "questions": [QUESTION],
                    "model": MODEL,
                    "sure": {MODEL: share, LARGE: 0.2},
                },
            }
        )
        + b"\n"
        for number, share in enumerate(shares, 1)
    ]
    work = rig.batch(*lines, shard_lines=7, escalation=Escalation(LARGE, LARGE, None, 0.9))
    cells = [*GOLD, "", ""]
    data = "text,known\n" + "".join(f"{number},{cell}\n" for number, cell in enumerate(cells))
    key, bucket = f"input/{work.id}.csv", rig.deployment.bucket.name
    put = rig.aws.clients["s3"].put_object(Bucket=bucket, Key=key, Body=data.encode())
    original = Source(bucket, key, put["ETag"], len(data), put.get("VersionId"))
    conversion = Conversion(FileFormat(is_table=True), "", recipe=to_json(RECIPE).decode())
    expected = reduce(add, (work.shard(number).expected for number in (0, 1)))
    fields = {"original": original, "conversion": conversion, "expected": expected}
    change(rig, work, shards_rung=2, **{name: dump(value) for name, value in fields.items()})
    return work


def change(rig: Rig, work: Work, **fields: object) -> None:
    """Set fields of the batch."""
    changed = rig.deployment.table.change_batch(work.id, Status.IN_PROGRESS, **fields)
    assert rig.run(changed) is not None


def is_decided(work: Work) -> Callable[[], bool]:
    """Return whether the small model has left all shards."""
    return lambda: all(work.shard(n).is_escalated for n in (0, 1)) and work.is_free


def learn(rig: Rig, work: Work) -> None:
    """Do what the control and the intake Lambda do about a batch."""
    advance(rig.aws, rig.deployment, work.id, plenty)
    for message in rig.messages(rig.deployment.intake):
        handle_message(rig.aws, rig.deployment, to_json(message).decode(), plenty)


def see(rig: Rig, work: Work) -> tuple[Any, Any]:
    """Return the batch and the round as the reaper reads them."""
    now = int(time.time())
    seen = read_batches(rig.aws, rig.deployment, [active_name(work.batch)], now)
    return seen, read_round(rig.aws, rig.deployment, seen, now)


LEARNT = Threshold(SURE, 12, 10, 1.0)
UNSURE_IDS = {"c11", "c12", "c14"}
ANSWERS = [
    (name, LARGE, 0.2) if name in UNSURE_IDS else (name, MODEL, SURE)
    for name in (f"c{n}" for n in range(1, 15))
]
NUM_CALLS = 80
"""More than the calls in which a threshold is learnt and the shards without unsure rows closed."""


def count_while_another_run_learns(rig: Rig, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn the threshold in a run whose lock lapses before it counts the rows of a shard."""
    count_rows, were_overtaken = threshold._count, []

    def overtaken(*args: Any) -> None:
        if not were_overtaken:
            were_overtaken.append(True)
            change(rig, work, turn_until=0)
            learn_threshold(rig.aws, rig.deployment, work.id, plenty)
        count_rows(*args)

    with monkeypatch.context() as patch:
        patch.setattr(threshold, "_count", overtaken)
        learn_threshold(rig.aws, rig.deployment, work.id, plenty)
    assert were_overtaken


async def test_rows_below_the_learnt_threshold_go_to_the_second_model(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets nothing before; then each line has one row, and each model's tokens count once."""
    work = table_work(rig)
    async with rig.worker():
        await until(is_decided(work))
        await until(lambda: rig.run(rig.deployment.control.count()))
    assert {"kind": "advance", "batch_id": work.id} in rig.messages()
    second = rig.deployment.work[LARGE]
    seen, this = see(rig, work)
    assert open_work_of(rig.deployment, seen, this) == []
    rig.run(check_batch(rig.deployment, seen[0], this))
    assert {"kind": "advance", "batch_id": work.id} in rig.messages()
    assert rig.messages(second) == []
    before = rig.run(describe_batch(rig.deployment, work.batch, time.time()))
    assert (before.request_counts.completed, before.tidemill.escalated_rows) == (0, 0)
    assert before.tidemill.escalate_below is None
    count_while_another_run_learns(rig, work, monkeypatch)
    assert rig.messages(second) == [shard_message(work.id, 1, is_escalated=True)] * 2
    for _ in range(2):  # a repeated message changes nothing
        learn(rig, work)
        assert work.batch.escalation == Escalation(LARGE, LARGE, None, 0.9, LEARNT)
    assert rig.messages(second) == []
    counted = rig.run(describe_batch(rig.deployment, work.batch, time.time()))
    assert (counted.request_counts.completed, counted.tidemill.escalated_rows) == (11, 3)
    assert work.shard(0).status is ShardStatus.DONE  # the first model is sure of all its rows
    seen, this = see(rig, work)
    [left] = open_work_of(rig.deployment, seen, this)
    assert (left.model, left.num_shards, left.num_rows, left.tokens_left) == (LARGE, 1, 3, 0)
    assert seen[0].shards.progress(0).expected == work.batch.expected
    rig.run(check_batch(rig.deployment, seen[0], this))  # the message is lost: it comes again
    async with rig.worker(model=LARGE) as large:
        await until(lambda: work.is_done)
    assert set(large.engine.requests) == {"known"}
    assert len(large.engine.requests) == len(UNSURE_IDS)
    assert answers(work) == ANSWERS
    after = rig.run(describe_batch(rig.deployment, work.batch, time.time()))
    assert (after.request_counts.completed, after.tidemill.escalated_rows) == (14, 3)
    tokens = before.usage.input_tokens
    assert after.usage.input_tokens == tokens + tokens * len(UNSURE_IDS) // 14
    buckets = rig.run(rig.deployment.ledger.list_history(work.id))
    assert sum(bucket.completed for bucket in buckets) == 14
    assert sum(bucket.tokens for bucket in buckets) == after.usage.output_tokens
    assert after.tidemill.escalate_below == SURE
    assert after.tidemill.learnt_threshold is not None
    assert after.tidemill.learnt_threshold.accepted_gold_rows == 10


def repair(rig: Rig, work: Work) -> list[dict[str, Any]]:
    """Do what follows from a check of the reaper; return the messages for the second model."""
    seen, this = see(rig, work)
    rig.run(check_batch(rig.deployment, seen[0], this))
    for queue in (rig.deployment.control, rig.deployment.intake, rig.deployment.control):
        for message in rig.messages(queue):
            if message["kind"] == "advance":
                advance(rig.aws, rig.deployment, work.id, plenty)
            else:
                handle_message(rig.aws, rig.deployment, to_json(message).decode(), plenty)
    return rig.messages(rig.deployment.work[LARGE])


@pytest.mark.parametrize("stride", with_long([15], [1]))
async def test_a_run_may_die_at_any_moment_while_a_threshold_is_learnt(
    rig: Rig, stride: int
) -> None:
    """Killed between any two of its requests, the reaper's messages lead to the same rows."""
    works = [table_work(rig) for _ in range(-(-NUM_CALLS // stride))]
    async with rig.worker():
        await until(lambda: all(is_decided(work)() for work in works))
    rig.messages()
    were_killed = []
    for number, work in enumerate(works):

        def run(work: Work = work) -> None:
            advance(rig.aws, rig.deployment, work.id, plenty)
            learn_threshold(rig.aws, rig.deployment, work.id, plenty)
            advance(rig.aws, rig.deployment, work.id, plenty)

        were_killed.append(is_killed_after(stride * number, rig.aws, run))
        change(rig, work, turn_until=0)  # the lock of the dead lapses
        rig.messages(rig.deployment.work[LARGE])  # those that it has sent are lost
        messages = [message for _ in range(3) for message in repair(rig, work)]
        expected = shard_message(work.id, 1, is_escalated=True)
        assert expected in messages
        assert work.batch.escalation == Escalation(LARGE, LARGE, None, 0.9, LEARNT)
        advance(rig.aws, rig.deployment, work.id, plenty, now=lambda: time.time() + 120)
        assert work.shard(0).status is ShardStatus.DONE  # also if the dead had its lease
    assert were_killed == sorted(were_killed, reverse=True)
    assert (were_killed[0], were_killed[-1]) == (True, False)
    for work in works:
        message = shard_message(work.id, 1, is_escalated=True)
        rig.run(rig.deployment.work[LARGE].send(message, group=None))
    async with rig.worker(model=LARGE):
        await until(lambda: all(work.is_done for work in works))
    for work in works:
        assert answers(work) == ANSWERS
        done = rig.run(rig.deployment.table.get_shard_progress(work.batch)).progress(0)
        assert (done.completed, done.failed, done.escalated) == (14, 0, 3)


@pytest.mark.parametrize("stride", with_long([40], [1]))
async def test_a_shard_given_up_before_the_threshold_is_learnt_keeps_its_drafts(
    rig: Rig, stride: int
) -> None:
    """It waits for the threshold, wherever a run dies: drafts that are sure then are final."""
    works, table = [table_work(rig) for _ in range(-(-NUM_CALLS // stride))], rig.deployment.table
    async with rig.worker():
        await until(lambda: all(is_decided(work)() for work in works))
    rig.messages()
    for number, work in enumerate(works):

        def mark(shard: int, *, is_decided: bool, work: Work = work) -> None:
            fields = {"escalated": is_decided or None}
            rig.run(table.update(live_key(work.id, shard), fields, "attribute_exists(pk)", {}))

        def run(work: Work = work) -> None:
            advance(rig.aws, rig.deployment, work.id, plenty)
            learn_threshold(rig.aws, rig.deployment, work.id, plenty)
            advance(rig.aws, rig.deployment, work.id, plenty)

        mark(0, is_decided=False)
        mark(1, is_decided=False)  # its worker died after the last draft
        rig.run(table.abandon(work.id, 1, "Given up."))
        advance(rig.aws, rig.deployment, work.id, plenty)
        assert work.shard(1).status is ShardStatus.PENDING
        mark(0, is_decided=True)
        is_killed_after(stride * number, rig.aws, run)
        change(rig, work, turn_until=0)  # the lock of the dead lapses
        for _ in range(3):
            repair(rig, work)
        advance(rig.aws, rig.deployment, work.id, plenty, now=lambda: time.time() + 120)
        assert answers(work) == [
            (name, MODEL, UNSURE if name in UNSURE_IDS else SURE) for name, *_ in ANSWERS
        ]
        assert reasons(work) == dict.fromkeys(sorted(UNSURE_IDS), (LARGE, "shard_failed"))
        done = rig.run(table.get_shard_progress(work.batch)).progress(0)
        assert (done.completed, done.failed, done.escalation_failed) == (14, 0, 3)


async def test_a_run_continues_the_work_of_those_before_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run has the time for one shard, and one at a time has the batch.

    A shard that was given up is closed afterwards, with the drafts that are sure by then.
    """
    work, table = table_work(rig), rig.deployment.table
    async with rig.worker():
        await until(is_decided(work))
    rig.run(table.abandon(work.id, 1, "Given up."))
    advance(rig.aws, rig.deployment, work.id, plenty)
    assert work.shard(1).status is ShardStatus.PENDING
    assert rig.messages(rig.deployment.intake) == [threshold_message(work.id)]
    monkeypatch.setattr(threshold, "_NUM_AT_ONCE", 1)
    opened: list[Source] = []

    def open_table_of(aws: Aws, source: Source, check: Callable[[], None]) -> io.BufferedReader:
        opened.append(source)
        file, until = open_object(aws, source, check), work.batch.turn_until
        assert file.read(1)
        assert work.batch.turn_until > until  # reading a long table renews the lock
        return file

    monkeypatch.setattr(threshold, "open_object", open_table_of)
    clock = map(float, count(int(time.time()), 6)).__next__
    lock = rig.deployment.table.acquire_lock(work.id, "other", now=0, until=time.time() + 60)
    assert rig.run(lock).is_acquired
    learn_threshold(rig.aws, rig.deployment, work.id, plenty)
    assert rig.messages(rig.deployment.intake) == []
    rig.run(rig.deployment.table.release_lock(work.id, "other"))
    for _ in range(5):  # both shards and the end of their list, twice
        times = iter([100.0, 0.0])
        learn_threshold(rig.aws, rig.deployment, work.id, times.__next__, now=clock)
        assert rig.messages(rig.deployment.intake) == [threshold_message(work.id)]
        assert work.batch.awaits_threshold
    learn_threshold(rig.aws, rig.deployment, work.id, iter([100.0]).__next__)
    assert work.batch.escalation == Escalation(LARGE, LARGE, None, 0.9, LEARNT)
    assert opened == [work.batch.input]  # its gold answers are read once
    assert rig.messages(rig.deployment.work[LARGE]) == []
    old = work.shard(0)
    mine = work.claim(0)
    assert not rig.run(table.count_escalated(old, Progress()))
    rig.run(table.release(mine, progress=old.progress, suspects=(), quarantined=(), attempts=0))
    assert not rig.run(table.count_escalated(old, Progress()))
    assert (work.shard(0).fence, work.shard(0).progress) == (mine.fence, old.progress)
    monkeypatch.setattr(close, "_NUM_THREADS", 1)  # otherwise calls of both shards interleave
    runs = (partial(close_later, rig, work, minutes) for minutes in count())
    num_calls, is_first_done = 0, False
    while is_killed_after(num_calls, rig.aws, next(runs)):
        num_calls += 1
        if not is_first_done and work.shard(0).status is ShardStatus.DONE:
            num_calls, is_first_done = 0, True  # the second shard is killed after each call, too
    assert num_calls > len(work.keys("kept")) > 1
    assert answers(work) == [
        (f"c{n}", MODEL, UNSURE if n in {11, 12, 14} else SURE) for n in range(1, 15)
    ]
    assert reasons(work) == dict.fromkeys(sorted(UNSURE_IDS), (LARGE, "shard_failed"))


def close_later(rig: Rig, work: Work, minutes: int) -> None:
    """Close the settled shards after the leases of the runs before have lapsed."""
    batch = work.batch
    close_settled(rig.aws, rig.deployment, batch, plenty, now=lambda: time.time() + 120 * minutes)


@pytest.mark.parametrize("seconds_left", with_long([100.0], [0.0]))
async def test_a_batch_that_ends_before_keeps_the_first_models_answers(
    rig: Rig, seconds_left: float
) -> None:
    """The run that learns its threshold requests its end, because no other run has the batch.

    A retry of it needs a threshold; one of a batch that has learnt its own inherits that.
    """
    work = table_work(rig)
    async with rig.worker():
        await until(is_decided(work))
    message = to_json(threshold_message(work.id)).decode()
    old = work.batch
    with pytest.raises(InvalidOption, match="before its threshold was learnt: pass `escalate_bel"):
        parse_retry(old, RetryRequest())
    with pytest.raises(InvalidOption, match="`target_accuracy` is not supported in a retry"):
        parse_retry(old, RetryRequest(target_accuracy=0.5))
    options = parse_retry(old, RetryRequest(escalate_below=0.5)).options
    assert (options.escalate, options.escalate_below) == (LARGE, 0.5)
    assert old.escalation is not None
    learnt = replace(old, escalation=replace(old.escalation, learnt=LEARNT))
    options = parse_retry(learnt, RetryRequest()).options
    assert (options.completion_window, options.escalate_below) == (DEFAULT_WINDOW, SURE)
    rig.messages()

    def cancel() -> float:
        work.move(Status.CANCELLING)
        finalize(rig.aws, rig.deployment, work.batch, plenty)
        return seconds_left

    learn_threshold(rig.aws, rig.deployment, work.id, cancel)
    assert rig.messages() == [{"kind": "advance", "batch_id": work.id}]
    handle_message(rig.aws, rig.deployment, message, plenty)  # as after the death of a run
    assert rig.messages() == [{"kind": "advance", "batch_id": work.id}]
    assert work.batch.awaits_threshold
    finalize(rig.aws, rig.deployment, work.batch, plenty)
    ended = rig.run(describe_batch(rig.deployment, work.batch, time.time())).tidemill
    assert (ended.escalated_rows, ended.escalation_failed_rows) == (14, 14)
    assert [row[1] for row in answers(work)] == [MODEL] * 14
    assert reasons(work) == {f"c{n}": (LARGE, "batch_cancelled") for n in range(1, 15)}


async def test_a_batch_whose_gold_answers_cannot_be_read_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is in its errors, and finalize keeps the first model's answers."""
    replaced, clashing, long = works = [table_work(rig) for _ in range(3)]
    async with rig.worker():
        await until(lambda: all(is_decided(work)() for work in works))
    original = replace(replaced.batch.input, etag='"other"', version_id=None)
    change(rig, replaced, original=dump(original))
    assert clashing.batch.conversion is not None
    recipe = to_json(RECIPE | {"ask": "escalation_error: Is it good?"}).decode()
    conversion = replace(clashing.batch.conversion, recipe=recipe)
    change(rig, clashing, conversion=dump(conversion))
    with monkeypatch.context() as patch:
        patch.setattr(threshold, "_LOOK_EVERY_ROWS", 1)
        for _ in range(2):
            learn_threshold(rig.aws, rig.deployment, long.id, lambda: 0.0)
            assert rig.messages(rig.deployment.intake) == [threshold_message(long.id)]
    reasons = (
        "The input was deleted or changed during",
        "`escalation_error`",
        "takes too long: use",
    )
    for work, reason in zip(works, reasons, strict=True):
        rig.messages()
        learn_threshold(rig.aws, rig.deployment, work.id, plenty)
        batch = work.batch
        assert (batch.status, batch.outcome) == (Status.FINALIZING, Status.FAILED)
        assert reason in batch.errors[0].message
        assert rig.messages() == [{"kind": "advance", "batch_id": work.id}]


async def test_a_repeated_first_message_waits_until_all_shards_are_decided(rig: Rig) -> None:
    """It makes the batch advance, as its sender may have died; the second model gets nothing."""
    work = table_work(rig)
    [first, _] = rig.run(rig.queue.receive(max_messages=2, wait_seconds=1, visibility_seconds=1))
    async with rig.worker():
        await until(is_decided(work))
        rig.messages()
        rig.run(rig.queue.send(shard_message(work.id, 0), group=None))
        await until(lambda: rig.run(rig.deployment.control.count()))
    assert first.body
    early = shard_message(work.id, 1, is_escalated=True)
    rig.run(rig.deployment.work[LARGE].send(early, group=None))
    async with rig.worker(model=LARGE) as large:
        await until(lambda: not rig.run(rig.deployment.work[LARGE].count()))
    assert large.engine.requests == []
    assert not work.shard(1).owner
