"""The schedule: whatever has been lost, every batch comes to its end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from localstack.event_source_mapping import LocalLambdaContext
from tests.emulators import MODEL, Emulator, active_ids
from tests.handler.finalize.rig import Cloud, Drop, plenty
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.intake_progress import Phase, WorkUnit, new_progress
from tidemill.batch.model import BatchError
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.batch.states import Status
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.queues import advance_message, shard_message
from tidemill.handler.aws.stores.shards import batch_key
from tidemill.handler.aws.stores.table import active_name
from tidemill.handler.control import reaper as reaping
from tidemill.handler.control.reaper import OVERDUE_SECONDS, SILENT_SECONDS, STUCK_SECONDS, reap
from tidemill.handler.deployment import deployment
from tidemill.handler.finalize.close import close_settled
from tidemill.handler.lambdas import reaper


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a separate deployment."""
    return Cloud.on(ministack)


def look(cloud: Cloud, after_seconds: float = 0) -> list[dict[str, Any]]:
    """Let the reaper look, as if after a while; return what it rang for on the control queue."""
    reap(cloud.aws, cloud.deployment, int(time.time() + after_seconds))
    return cloud.messages()


def rung(cloud: Cloud) -> list[dict[str, Any]]:
    """Return the messages that rang for shards."""
    return cloud.messages(queue=cloud.deployment.work[MODEL])


def active(cloud: Cloud) -> list[str]:
    """Return the batches that the reaper looks at."""
    found: list[str] = cloud.run(active_ids(cloud.deployment.table))
    return found


def advance(drop: Drop) -> list[dict[str, object]]:
    """Return what rings once for the batch."""
    return [advance_message(drop.id)]


def test_a_healthy_batch_is_left_alone(mini: Cloud) -> None:
    """Nothing is rung for a batch whose shards are held or waiting in the queue."""
    drop = mini.drop(8).begin()
    drop.claim(0, lease_seconds=60)
    queue = mini.deployment.work[MODEL]
    mini.run(queue.send(shard_message(drop.id, 1), group=None))
    assert look(mini) == []
    assert mini.run(queue.count()) == 1


def test_lost_doorbells_are_rung_again(mini: Cloud) -> None:
    """If the queue is empty, unclaimed shards get one message each, and no others."""
    drop = mini.drop(16).begin()
    drop.run_shard(0)
    drop.claim(1, lease_seconds=600)
    drop.claim(2)
    assert look(mini) == []
    assert look(mini) == []
    assert rung(mini) == [shard_message(drop.id, 2), shard_message(drop.id, 3)]


def test_a_busy_queue_hides_lost_doorbells_for_a_while_only(mini: Cloud) -> None:
    """If other messages wait, a shard gets a message when nothing has moved for long."""
    drop = mini.drop(4).begin()
    queue = mini.deployment.work[MODEL]
    mini.run(queue.send(shard_message("another", 0), group="another"))
    for after_seconds in (0, STUCK_SECONDS - 5, STUCK_SECONDS + 5, STUCK_SECONDS + 65):
        look(mini, after_seconds)
        num_rung = mini.run(queue.count()) - 1
        assert num_rung == int(after_seconds > STUCK_SECONDS)
    assert shard_message(drop.id, 0) in rung(mini)


def test_shards_that_fail_again_and_again_are_given_up(mini: Cloud) -> None:
    """After the maximum of fruitless claims the shard's lines get rows with the reason."""
    drop = mini.drop(4).begin()
    for _ in range(mini.deployment.settings.max_attempts):
        assert look(mini) == []
        drop.claim(0)
    assert look(mini) == advance(drop)
    assert "no new row in 5 attempts" in (drop.shard(0).abandoned or "")
    assert look(mini) == advance(drop)
    close_settled(mini.aws, mini.deployment, drop.batch, plenty)
    mini.messages(wait_seconds=10)
    assert look(mini) == advance(drop)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    assert drop.ids("error") == ["c1", "c2", "c3", "c4"]
    assert [error.code for error in drop.batch.errors] == ["shard_failed"]


def test_the_end_of_the_window_is_noticed(mini: Cloud) -> None:
    """A running batch is rung for, one that is still being checked expires at once."""
    running, checked = mini.drop(4).begin(), mini.drop(4, key="input/y.jsonl")
    assert look(mini, after_seconds=3601) == advance(running)
    assert running.batch.status is Status.IN_PROGRESS
    assert checked.batch.status is Status.EXPIRED
    assert checked.report()["status"] == "expired"
    assert active(mini) == [running.id]


def test_a_batch_whose_shards_are_done_moves_on(mini: Cloud) -> None:
    """The last doorbell of the last shard may be lost too."""
    drop = mini.drop(4).begin()
    drop.run_shard(0)
    assert look(mini) == advance(drop)


def test_ringing_that_went_silent_is_rung_for(mini: Cloud) -> None:
    """A step without progress for longer than a run lasts is started again."""
    drop = mini.drop(8).move(Status.IN_PROGRESS, shards_rung=1, num_shards=2, shards_left=2)
    assert look(mini) == []
    assert look(mini, STUCK_SECONDS - 5) == []
    assert look(mini, STUCK_SECONDS + 5) == advance(drop)
    assert look(mini, STUCK_SECONDS + 300) == []
    mini.run(mini.deployment.table.change_batch(drop.id, drop.batch.status, shards_rung=2))
    assert look(mini, 2 * STUCK_SECONDS + 60) == []
    assert rung(mini) == [shard_message(drop.id, 0), shard_message(drop.id, 1)]


def test_a_file_without_progress_gets_new_messages(mini: Cloud) -> None:
    """Each remaining unit gets one if none was done for longer than a run lasts."""
    drop = mini.drop(8)

    def seen(after_seconds: int) -> list[str]:
        look(mini, after_seconds)
        queue = mini.deployment.intake
        received = mini.run(queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60))
        for message in received:
            mini.run(queue.delete(message))
        return sorted(json.loads(message.body)["unit"] for message in received)

    assert seen(0) == seen(STUCK_SECONDS - 5) == []
    assert seen(STUCK_SECONDS + 5) == [""]
    assert seen(STUCK_SECONDS + 300) == []
    reading = new_progress(FileFormat(), ShardLimits(), 30, 10, None)
    mini.run(mini.deployment.intake_progress.get_or_create(drop.id, reading))
    mini.run(mini.deployment.intake_progress.complete_unit(drop.id, WorkUnit(Phase.SCAN, 1)))
    assert seen(STUCK_SECONDS + 900) == []
    assert seen(2 * STUCK_SECONDS + 910) == ["", "scan-0", "scan-2"]


@pytest.mark.parametrize("status", [Status.FINALIZING, Status.CANCELLING])
def test_finalize_that_went_silent_is_rung_for(mini: Cloud, status: Status) -> None:
    """Runs that come one after the other are left alone; when none is heard of one is rung for."""
    drop = mini.drop(4).begin().move(status)
    assert look(mini) == []
    assert look(mini, SILENT_SECONDS + 5) == advance(drop)
    until = time.time() + SILENT_SECONDS
    mini.run(mini.deployment.table.acquire_lock(drop.id, "run", now=time.time(), until=until))
    assert look(mini, SILENT_SECONDS + 5) == []
    mini.run(mini.deployment.table.release_lock(drop.id, "run"))
    assert look(mini, SILENT_SECONDS + 5) == []
    assert look(mini, 2 * SILENT_SECONDS + 5) == advance(drop)


@pytest.mark.parametrize(
    ("status", "last"),
    [
        (None, Status.EXPIRED),
        (Status.IN_PROGRESS, Status.EXPIRED),
        (Status.FINALIZING, Status.FAILED),
        (Status.CANCELLING, Status.CANCELLED),
    ],
)
def test_no_batch_stays_for_ever(mini: Cloud, status: Status | None, last: Status) -> None:
    """A day after everything should have been over the batch ends, and its errors say so."""
    drop = mini.drop(4)
    if status is not None:
        drop.begin()
        if status is not Status.IN_PROGRESS:
            drop.move(status)
    look(mini, 3600 + OVERDUE_SECONDS + 60)
    assert drop.batch.status is last
    assert [error.code for error in drop.batch.errors] == ["internal_error"]
    assert drop.report()["status"] == drop.batch.status
    assert active(mini) == []


def test_even_a_bucket_that_takes_nothing_keeps_no_batch_alive(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the report cannot be written, the batch ends without one."""
    drop = mini.drop(4).begin().move(Status.FINALIZING)
    monkeypatch.setattr(mini.deployment, "bucket", Bucket("there-is-no-such-bucket"))
    look(mini, 3600 + OVERDUE_SECONDS + 60)
    monkeypatch.undo()
    assert drop.batch.status is Status.FAILED
    assert drop.report() is None
    assert active(mini) == []


def test_an_unannounced_status_is_announced(mini: Cloud) -> None:
    """A crash between a move and its announcement is repaired, and the end leaves the list."""
    running = mini.drop(4).begin()
    ended = mini.drop(4, key="input/y.jsonl").move(Status.FAILED)
    look(mini)
    assert running.batch.announced is Status.IN_PROGRESS
    assert ended.batch.announced is Status.FAILED
    assert active(mini) == [running.id]


def test_one_batch_that_cannot_be_mended_does_not_stop_the_others(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is looked at by itself."""
    drops = [mini.drop(4, key=f"input/{number}.jsonl").begin() for number in range(3)]
    for drop in drops:
        drop.run_shard(0)
    real = reaping.announce

    def announce(deployment: Any, batch: Any) -> Iterator[Any]:
        if batch.id == drops[1].id:
            raise reaping.AwsError("the bus is full")
        return real(deployment, batch)

    monkeypatch.setattr(reaping, "announce", announce)
    assert sorted(str(found["batch_id"]) for found in look(mini)) == sorted(d.id for d in drops)
    assert [drop.batch.announced is None for drop in drops] == [False, True, False]


def test_an_entry_without_a_batch_is_taken_off_the_list(mini: Cloud) -> None:
    """A missing batch is not checked for ever."""
    table = mini.deployment.table.name
    mini.aws.clients["dynamodb"].put_item(
        TableName=table, Item={"pk": {"S": "ACTIVE"}, "sk": {"S": "BATCH#batch_x"}}
    )
    assert look(mini) == []
    assert active(mini) == []


def test_an_entry_of_an_earlier_version_is_moved_to_its_tenant(mini: Cloud) -> None:
    """After one run only the tenant's own list has it."""
    drop, table = mini.drop(4).begin(), mini.deployment.table
    mini.run(table.forget_active(active_name(drop.batch)))
    assert active(mini) == []
    mini.aws.clients["dynamodb"].put_item(
        TableName=table.name, Item={"pk": {"S": "ACTIVE"}, "sk": {"S": f"BATCH#{drop.id}"}}
    )
    look(mini)
    assert active(mini) == [drop.id]
    assert [batch.id for batch in mini.run(mini.deployment.overview.list_active("owner"))] == [
        drop.id
    ]


def test_errors_that_are_known_are_kept(mini: Cloud) -> None:
    """The errors of a batch from before it was given up are retained."""
    known = {"code": "input_changed", "message": "The input has changed."}
    drop = mini.drop(4).begin().move(Status.FINALIZING, outcome="failed", errors=[known])
    look(mini, 3600 + OVERDUE_SECONDS + 60)
    assert drop.batch.errors[0] == BatchError(**known)
    assert len(drop.batch.errors) == 2


def test_the_handler_reads_its_environment(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Lambda handler finds its deployment in the environment and looks at what is active."""
    drop = mini.drop(4).begin()
    drop.run_shard(0)
    for name, value in (mini.emulator.environment | mini.resources.environment).items():
        monkeypatch.setenv(name, value)
    deployment.cache_clear()
    reaper._aws.cache_clear()
    reaper.handler({"source": "aws.scheduler"}, LocalLambdaContext("reaper", 900))
    deployment.cache_clear()
    reaper._aws.cache_clear()
    assert mini.messages(wait_seconds=10) == advance(drop)


def test_an_unreadable_batch_does_not_delay_others(mini: Cloud) -> None:
    """Its item is not understood by this version: all others are checked."""
    drops = [mini.drop(4, key=f"input/{number}.jsonl").begin() for number in range(4)]
    drops.sort(key=lambda drop: drop.id)
    for drop in drops:
        drop.run_shard(0)
    table = mini.deployment.table
    mini.run(table.update(batch_key(drops[0].id), {"status": "of another version"}))
    assert sorted(str(rung["batch_id"]) for rung in look(mini)) == [drop.id for drop in drops[1:]]
    assert drops[0].id in active(mini)


def test_a_run_without_time_is_continued_by_the_next(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run reads from where the last one ended, and fleets are scaled before any repair."""
    drops = [mini.drop(4, key=f"input/{number}.jsonl").begin() for number in range(5)]
    for drop in drops:
        drop.run_shard(0)
    monkeypatch.setattr(reaping, "_PAGE", 2)
    monkeypatch.setattr(reaping, "_CHUNK", 1)
    scaled: list[int] = []

    def note(*_: object, **__: object) -> Operation[None]:
        scaled.append(len(mini.messages()))
        return
        yield

    monkeypatch.setattr(reaping, "scale_fleets", note)
    seconds = count(0, reaping._READ_SECONDS + 1)
    found: list[str] = []
    for _ in range(5):
        reap(mini.aws, mini.deployment, int(time.time()), clock=lambda: next(seconds))
        found += [str(rung["batch_id"]) for rung in mini.messages()]
    assert sorted(found) == sorted(drop.id for drop in drops)
    assert scaled == [0] * 5


def test_a_look_takes_few_calls_for_each_batch(mini: Cloud) -> None:
    """Healthy batches take one query each, and the depth of their queue is read once."""
    drops = [mini.drop(8, key=f"input/{number}.jsonl").begin() for number in range(10)]
    for drop in drops:
        for number in range(2):
            mini.run(mini.deployment.work[MODEL].send(shard_message(drop.id, number), group=None))
    look(mini)
    calls: Counter[str] = Counter()
    for service in ("dynamodb", "sqs", "ssm", "events"):
        events = mini.aws.clients[service].meta.events
        events.register("before-call.*.*", lambda model, **_: calls.update([model.name]))
    reap(mini.aws, mini.deployment, int(time.time()))
    assert calls == {"GetItem": 1, "BatchGetItem": 1, "Query": 1 + 10, "GetQueueAttributes": 1}
