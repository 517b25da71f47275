"""Cascades: workers of two models run the shards of one batch, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from tests.emulators import MODEL, Emulator
from tests.handler.finalize.rig import plenty
from tests.handler.worker.fakes import FaultyAws, QuickAws
from tests.handler.worker.rig import Rig, Work, until
from tests.long_parameters import with_long
from tidemill.batch.escalation import Escalation
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of
from tidemill.batch.states import Status
from tidemill.handler.aws.calls import Call
from tidemill.handler.aws.queues import shard_message
from tidemill.handler.aws.stores.table import active_name
from tidemill.handler.control.dead_letters import handle_dead_letter
from tidemill.handler.control.reaper import check_batch, open_work_of, read_round
from tidemill.handler.errors import AwsError
from tidemill.handler.finalize.close import close_settled
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.fleet.open_batches import read_batches
from tidemill.handler.queries.batch_view import describe_batch
from tidemill.handler.worker.context import context as context_module

LARGE = "large"
ESCALATION = Escalation(LARGE, LARGE, 0.8)
BODIES: list[dict[str, Any]] = [
    {"sure": {MODEL: 0.9, LARGE: 0.1}},
    {"sure": {MODEL: 0.6, LARGE: 0.95}},
    {"sure": {LARGE: 0.7}},
    {"sure": {MODEL: 0.3}},
]
"""A sure answer, an unsure one, a failed one, and one with which the large model fails."""


@pytest.fixture
def rig(ministack: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Return a deployment of two models with prices."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    prices = f'{{"{MODEL}": 1.0, "{LARGE}": 5.0}}'
    return Rig.on(ministack, tmp_path, (MODEL, LARGE), gpu_hour_prices=prices)


def batch_of(rig: Rig, *, gate: Path = Path("/"), **options: Any) -> Work:
    """Return a batch of decisions with a second model, answered while the gate exists."""
    bodies = [{"model": MODEL, "gate": str(gate), **body} for body in BODIES]
    lines = [
        b'{"custom_id": "c%d", "url": "/v1/decisions", "body": %b}\n' % (number, body)
        for number, body in enumerate(map(_as_json, bodies), 1)
    ]
    return rig.batch(*lines, escalation=ESCALATION, **options)


def _as_json(body: dict[str, Any]) -> bytes:
    return to_json({"input": "x", "questions": [QUESTION], **body})


QUESTION = {"type": "predicate", "instructions": "Is it good?"}


def answers(work: Work) -> list[tuple[str, str, float]]:
    """Return ID, model and probability of each successful row."""
    return [
        (row["custom_id"], body["model"], body["answers"][0]["probability"])
        for row in work.sealed()
        for body in (row["response"]["body"],)
    ]


ANSWERS = [
    ("c1", MODEL, 0.9),
    ("c2", LARGE, 0.95),
    ("c3", LARGE, 0.7),
    ("c4", MODEL, 0.3),
]


def reasons(work: Work) -> dict[str, tuple[str, str]]:
    """Return model and code of the escalation error of each row that has one."""
    return {
        row["custom_id"]: (found["model"], found["code"])
        for row in work.sealed()
        if (found := row["response"]["body"].get("escalation_error"))
    }


def is_escalated(work: Work) -> Callable[[], bool]:
    """Return whether the first shard waits for the large model."""
    return lambda: work.shard().is_escalated and work.shard().owner is None


async def test_unsure_and_failed_rows_are_answered_by_the_second_model(rig: Rig) -> None:
    """Each line has one row, with the line's ID; counts grow, and both models' tokens count.

    Of the drafts, the second model's worker reads the lines that it needs.
    """
    work = batch_of(rig, echo_fields=("url",))
    async with rig.worker():
        await until(is_escalated(work))
    batch = rig.run(describe_batch(rig.deployment, work.batch, time.time()))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 0)
    assert (batch.tidemill.escalate, batch.tidemill.escalated_rows) == (LARGE, 3)
    tokens, seconds = batch.usage.input_tokens, batch.tidemill.gpu_seconds
    assert rig.messages(rig.queue) == []
    calls: list[Call] = []
    async with (
        QuickAws() as aws,
        rig.worker(model=LARGE, aws=FaultyAws(aws, calls.append)) as second,
    ):
        await until(lambda: work.is_done)
    reads = [call.arguments for call in calls if call.method == "get_object"]
    assert {"Range" in each for each in reads if "/draft-" in each["Key"]} == {True}
    assert len(second.engine.requests) == 3
    assert answers(work) == ANSWERS
    assert reasons(work) == {"c4": (LARGE, "c")}
    printed = b"".join(rig.run(rig.deployment.bucket.get(key)) for key in work.keys("output"))
    assert printed.count(b',"url":"/v1/decisions"}\n') == printed.count(b'"url":') == 4
    raws = [RawLine(number, line.rstrip(b"\n")) for number, line in enumerate(work.lines, 1)]
    assert [row["id"] for row in work.sealed()] == [row_id_of(raw.digest) for raw in raws]
    batch = rig.run(describe_batch(rig.deployment, work.batch, time.time()))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 0)
    assert (batch.tidemill.escalated_rows, batch.tidemill.escalation_failed_rows) == (3, 1)
    assert batch.usage.input_tokens > tokens
    done = rig.run(rig.deployment.table.get_shard_progress(work.batch)).progress(0)
    assert done.escalated_gpu_seconds == pytest.approx(done.gpu_seconds - seconds, abs=0.01)
    assert rig.messages()[-1]["kind"] == "advance"


async def test_a_shard_without_unsure_rows_is_done_after_the_first_model(rig: Rig) -> None:
    """The second model gets nothing."""
    body = _as_json({"model": MODEL, "sure": {MODEL: 1}})
    line = b'{"custom_id": "a", "url": "/v1/decisions", "body": %b}\n' % body
    work = rig.batch(line, escalation=ESCALATION)
    async with rig.worker():
        await until(lambda: work.is_done)
    assert rig.messages(rig.deployment.work[LARGE]) == []


async def test_lines_whose_drafts_are_lost_are_answered_by_the_second_model(rig: Rig) -> None:
    """They are not given up, whether its worker has stopped or their count was wrong."""
    gate, second = rig.folder / "gate", rig.deployment.work[LARGE]
    gate.touch()
    work = batch_of(rig, gate=gate)
    async with rig.worker():
        await until(is_escalated(work))
    for key in work.keys("draft"):
        rig.run(rig.deployment.bucket.put(key, b"nonsense"))
    gate.unlink()
    async with rig.worker(model=LARGE) as large:
        await until(lambda: len(large.engine.requests) == 3)
    assert work.shard().progress.escalated == 3
    mine, message = work.claim(), shard_message(work.id, 0, is_escalated=True)
    wrong = replace(mine.progress, escalated=0)
    release = rig.deployment.table.release
    rig.run(release(mine, progress=wrong, suspects=(), quarantined=(), attempts=0))
    rig.messages(second)
    close_settled(rig.aws, rig.deployment, work.batch, plenty)
    assert rig.messages(second) == [message]
    gate.touch()
    rig.run(second.send(message, group=None))
    async with rig.worker(model=LARGE):
        await until(lambda: work.is_done)
    assert answers(work) == ANSWERS[:3]
    [failed] = work.sealed("errors")
    assert (failed["custom_id"], failed["response"]["body"]["error"]["code"]) == ("c4", "c")


STEPS: dict[str, Callable[[Call], bool]] = {
    "part": lambda call: "/part-" in str(call.arguments.get("Key")),
    "draft": lambda call: "/draft-" in str(call.arguments.get("Key")),
    "escalation": lambda call: "#escalated" in str(call.arguments.get("UpdateExpression")),
    "message": lambda call: "escalated_shard" in str(call.arguments.get("MessageBody")),
    "deletion": lambda call: call.method == "delete_message",
}


@pytest.mark.parametrize(
    ("model", "step", "after"),
    with_long(
        [(MODEL, "draft", False), (MODEL, "escalation", True), (LARGE, "part", True)],
        [
            *((MODEL, "part", after) for after in (False, True)),
            *((MODEL, "message", after) for after in (False, True)),
            *((model, "deletion", after) for model in (MODEL, LARGE) for after in (False, True)),
            *((MODEL, "draft", True), (MODEL, "escalation", False), (LARGE, "part", False)),
        ],
    ),
)
async def test_a_worker_may_die_at_each_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, model: str, step: str, *, after: bool
) -> None:
    """The redelivered message of its shard is enough for each line to get its one row."""
    monkeypatch.setattr(context_module, "PATIENCE_SECONDS", 0)
    work, dead = batch_of(rig), [False]
    if model == LARGE:
        async with rig.worker():
            await until(is_escalated(work))

    def refuses(call: Call) -> Exception | None:
        was_dead = dead[0]
        dead[0] = was_dead or STEPS[step](call)
        return AwsError("dead") if was_dead or (dead[0] and not after) else None

    async with QuickAws() as aws, rig.worker(model=model, aws=FaultyAws(aws, refuses)):
        await until(lambda: dead[0])
    queue = rig.deployment.work[model]
    rig.run(queue.send(shard_message(work.id, 0, is_escalated=model == LARGE), group=None))

    def later() -> float:
        return time.time() + 600  # the lease of the dead has lapsed

    async with rig.worker(wall=later), rig.worker(model=LARGE, wall=later):
        await until(lambda: work.is_done)
    assert answers(work) == ANSWERS
    done = rig.run(rig.deployment.table.get_shard_progress(work.batch)).progress(0)
    assert (done.completed, done.escalated, done.escalation_failed) == (4, 3, 1)


@pytest.mark.parametrize(
    ("status", "changes"),
    [(Status.CANCELLING, {}), (Status.FINALIZING, {"outcome": "expired"})],
)
async def test_an_early_end_keeps_the_first_models_answers(
    rig: Rig, status: Status, changes: dict[str, Any]
) -> None:
    """Rows that wait for the second model are those of the first one; their tokens count once."""
    work = batch_of(rig)
    async with rig.worker():
        await until(is_escalated(work))
    before = rig.run(rig.deployment.table.get_shard_progress(work.batch)).progress(0)
    work.move(status, **changes)
    finalize(rig.aws, rig.deployment, work.batch, plenty)
    assert work.batch.is_terminal
    assert answers(work) == [("c1", MODEL, 0.9), ("c2", MODEL, 0.6), ("c4", MODEL, 0.3)]
    code = "batch_cancelled" if status is Status.CANCELLING else "batch_expired"
    assert reasons(work) == dict.fromkeys(("c2", "c4"), (LARGE, code))
    assert work.ids("errors") == ["c3"]
    final = work.batch.final
    assert final is not None
    assert (final.completed, final.failed, final.prompt_tokens) == (3, 1, before.prompt_tokens)
    assert final.escalation_failed == 2


async def test_lost_messages_of_escalated_shards_are_sent_again(rig: Rig) -> None:
    """The reaper and dead letters send them to the second model, and count its open work."""
    work = batch_of(rig, shard_lines=2)
    rig.run(rig.deployment.table.change_batch(work.id, Status.IN_PROGRESS, shards_rung=2))
    async with rig.worker():
        await until(lambda: work.shard(1).is_escalated and work.is_free)
    rig.messages(rig.queue)
    second = rig.deployment.work[LARGE]
    expected = [shard_message(work.id, number, is_escalated=True) for number in (0, 1)]
    assert sorted(rig.messages(second), key=str) == expected
    now = int(time.time())
    seen = read_batches(rig.aws, rig.deployment, [active_name(work.batch)], now)
    this = read_round(rig.aws, rig.deployment, seen, now)
    [open_work] = open_work_of(rig.deployment, seen, this)
    assert (open_work.model, open_work.num_shards, open_work.num_rows) == (LARGE, 2, 3)
    rig.run(check_batch(rig.deployment, seen[0], this))
    assert sorted(rig.messages(second), key=str) == expected
    assert rig.messages(rig.queue) == []
    dead = to_json(shard_message(work.id, 1)).decode()
    rig.run(handle_dead_letter(rig.deployment, dead, now))
    assert rig.messages(second) == expected[1:]
