"""Uploads whose events were lost, come late, or die: each is run, and once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from pydantic_core import to_json

from localstack.event_source_mapping import LocalLambdaContext
from tests.emulators import Emulator, active_ids
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.queues import parse_message
from tidemill.handler.aws.stores.drops import EVENTS_END_SECONDS
from tidemill.handler.control.dead_letters import DROP_PATIENCE_SECONDS, handle_dead_letter
from tidemill.handler.control.sweep import EVERY_SECONDS, SETTLED_SECONDS, WINDOW_SECONDS, sweep
from tidemill.handler.deployment import deployment
from tidemill.handler.intake.control_messages import (
    Drop,
    Ignored,
    Sweep,
    drop_message,
    parse_control,
    sweep_message,
)
from tidemill.handler.intake.new_batch import create_batch_of_drop
from tidemill.handler.lambdas import control, reaper

LATER = SETTLED_SECONDS + 60


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a separate deployment, on each emulator in turn."""
    return Cloud.on(emulator)


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return such a deployment on one emulator."""
    return Cloud.on(ministack)


def receive_messages(cloud: Cloud) -> list[Drop | Sweep]:
    """Take our own messages about uploads and sweeps off their queues."""
    found = list[Drop | Sweep]()
    for queue in (cloud.deployment.control, cloud.deployment.drops):
        receive = queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60)
        while received := cloud.run(receive):
            for message in received:
                cloud.run(queue.delete(message))
                if "kind" in (parse_message(message.body) or {}):
                    found += [r for r in parse_control(message.body) if isinstance(r, Drop | Sweep)]
            receive = queue.receive(max_messages=10, wait_seconds=0, visibility_seconds=60)
    return sorted(found, key=lambda each: each.key if isinstance(each, Drop) else "")


def swept(
    cloud: Cloud, *, later: int = LATER, after: str = "", time_left: Callable[[], float] = plenty
) -> list[Drop | Sweep]:
    """Sweep as if that many seconds had passed, and return the messages sent."""
    cloud.run(sweep(cloud.deployment, after, int(time.time()) + later, time_left))
    return receive_messages(cloud)


def take(cloud: Cloud, drop: Drop | Sweep) -> Batch | None:
    """Return what an upload makes, if anything."""
    assert isinstance(drop, Drop)
    return cloud.run(create_batch_of_drop(cloud.deployment, drop, int(time.time())))


def test_an_upload_without_an_event_is_found_and_run_once(cloud: Cloud) -> None:
    """One or more sweeps find it; a late event finds the existing batch."""
    known = cloud.create(lines_of(1), "input/known.jsonl")
    event = cloud.put(lines_of(2), "input/a ü+.csv", {"completion-window": "2h"})
    cloud.put(b"", "input/folder/")
    [first] = swept(cloud)
    [again] = swept(cloud)
    assert first == again
    batch = take(cloud, first)
    assert batch is not None
    assert (batch.source.key, batch.source.version_id) == (event.key, event.version_id)
    assert batch.options.completion_window == "2h"
    assert take(cloud, again) == batch
    assert take(cloud, event) == batch
    assert swept(cloud) == []
    assert sorted(cloud.run(active_ids(cloud.deployment.table))) == sorted([known.id, batch.id])


def test_an_event_that_is_only_late_is_not_run_twice(cloud: Cloud) -> None:
    """Its batch is made between the look and the message."""
    event = cloud.put(lines_of(1))
    [found] = swept(cloud)
    batch = take(cloud, event)
    assert batch is not None
    assert take(cloud, found) == batch
    assert take(cloud, replace(event, sequencer="0")) is None


def test_only_what_is_recent_and_settled_is_found(mini: Cloud) -> None:
    """An event may be on its way; a batch of long ago may have been forgotten."""
    mini.put(lines_of(1))
    assert swept(mini, later=SETTLED_SECONDS - 600) == []
    assert len(swept(mini, later=WINDOW_SECONDS - 600)) == 1
    assert swept(mini, later=WINDOW_SECONDS + 60) == []
    assert WINDOW_SECONDS < EVENTS_END_SECONDS


def test_a_newer_object_of_a_known_key_is_found(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the older one; an older one that is back has had its batch."""
    first = mini.put(lines_of(1))
    older = mini.take(first)
    _dated(monkeypatch, 2)
    second = mini.put(lines_of(2))
    [found] = swept(mini)
    newer = take(mini, found)
    assert newer is not None
    assert newer.predecessor == older.id
    assert mini.batch(older.id).status is Status.CANCELLED
    assert take(mini, first) == mini.batch(older.id)
    assert take(mini, second) == newer
    _dated(monkeypatch, -9)
    assert swept(mini) == []
    assert take(mini, replace(found, mark="another sweep")) == newer


def _dated(monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Let the bucket date its objects so much later: it knows whole seconds only."""
    listing, head = Bucket.list_page, Bucket.head

    def list_later(bucket: Bucket, prefix: str, after: str) -> Iterator[object]:
        page, is_more = yield from listing(bucket, prefix, after)
        return [each._replace(modified=each.modified + seconds) for each in page], is_more

    def head_later(bucket: Bucket, key: str, version_id: str | None = None) -> Iterator[object]:
        found = yield from head(bucket, key, version_id)
        if found is None:
            return None
        at = type(found["LastModified"]).fromtimestamp(
            found["LastModified"].timestamp() + seconds, found["LastModified"].tzinfo
        )
        return {**found, "LastModified": at}

    monkeypatch.setattr(Bucket, "list_page", list_later)
    monkeypatch.setattr(Bucket, "head", head_later)


def _same_second(cloud: Cloud, *files: bytes) -> list[Drop]:
    """Upload all to one key within one second, and return what the events would tell."""
    head = cloud.deployment.bucket.head
    while True:
        drops = [cloud.put(data) for data in files]
        found = [cloud.run(head(drop.key, drop.version_id)) or {} for drop in drops]
        if len({int(each["LastModified"].timestamp()) for each in found}) == 1:
            return drops


def test_the_second_upload_of_a_second_is_found(mini: Cloud) -> None:
    """The one that the key is now, once."""
    first, second = _same_second(mini, lines_of(1), lines_of(2))
    older = mini.take(first)
    [found] = swept(mini)
    newer = take(mini, found)
    assert newer is not None
    assert (newer.source.version_id, newer.predecessor) == (second.version_id, older.id)
    assert swept(mini) == []
    assert take(mini, first) == mini.batch(older.id)
    assert take(mini, second) == newer


def test_a_late_event_of_the_same_second_replaces_nothing(mini: Cloud) -> None:
    """An upload that a listing found later is the key's current content."""
    first, second = _same_second(mini, lines_of(1), lines_of(2))
    [found] = swept(mini)
    newer = take(mini, found)
    assert newer is not None
    assert newer.source.version_id == second.version_id
    assert take(mini, first) is None
    assert mini.batch(newer.id).status is Status.VALIDATING


def test_a_key_that_no_message_can_hold_stops_no_other(cloud: Cloud) -> None:
    """SQS refuses some characters: messages are ASCII."""
    keys = ["input/a\ufffe.jsonl", "input/b\U0001f600.jsonl", "input/c.jsonl"]
    for key in keys:
        cloud.put(lines_of(1), key)
    found = swept(cloud)
    assert [drop.key for drop in found if isinstance(drop, Drop)] == keys
    assert [batch.source.key for drop in found if (batch := take(cloud, drop))] == keys


def test_two_names_with_the_same_results_are_one(mini: Cloud) -> None:
    """The last one counts; neither a sweep nor a repeated event brings the other back."""
    first = mini.put(lines_of(1), "input/x")
    older = mini.take(first)
    newer = mini.take(mini.put(lines_of(2), "input/x.jsonl"))
    assert newer.predecessor == older.id
    assert mini.batch(older.id).status is Status.CANCELLED
    assert swept(mini) == []
    assert take(mini, first) == mini.batch(older.id)
    assert mini.run(mini.deployment.table.newest_drop(mini.bucket, newer.outputs)) == newer.id


def test_a_sweep_goes_on_where_its_time_ended(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads page by page, and a message continues it."""
    for number in range(5):
        mini.put(lines_of(1), f"input/{number}")
    listing = Bucket.list_page

    def two(bucket: Bucket, prefix: str, after: str) -> Iterator[object]:
        page, is_more = yield from listing(bucket, prefix, after)
        return page[:2], is_more or len(page) > 2

    monkeypatch.setattr(Bucket, "list_page", two)
    rest, *found = swept(mini, time_left=lambda: 0.0)
    assert rest == Sweep("input/1")
    assert [drop.key for drop in found if isinstance(drop, Drop)] == ["input/0", "input/1"]
    found = swept(mini, after="input/1")
    assert [drop.key for drop in found if isinstance(drop, Drop)] == [
        f"input/{n}" for n in (2, 3, 4)
    ]


def test_a_lost_event_without_a_batch_is_sent_again(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent unchanged, for as long as the sweep would find it."""
    monkeypatch.setattr("tidemill.handler.control.dead_letters.MAX_DELAY_SECONDS", 0)
    drop = mini.put(lines_of(1))
    now = int(time.time())

    def dead(message: Drop, later: int) -> list[Drop | Sweep]:
        body = to_json(drop_message(message)).decode()
        mini.run(handle_dead_letter(mini.deployment, body, now + later))
        return receive_messages(mini)

    again = replace(drop, failing_since=now)
    assert dead(drop, 0) == [again]
    assert dead(again, DROP_PATIENCE_SECONDS - 1) == [again]
    assert dead(again, DROP_PATIENCE_SECONDS) == []
    assert take(mini, again) == mini.take(drop)


def test_an_upload_found_by_a_sweep_is_sent_again_until_the_next_sweep(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each day would add another message that lives for eight."""
    monkeypatch.setattr("tidemill.handler.control.dead_letters.MAX_DELAY_SECONDS", 0)
    mini.put(lines_of(1))
    [found] = swept(mini)
    assert isinstance(found, Drop)
    now = int(time.time())
    again = replace(found, failing_since=now)
    for later, expected in ((0, [again]), (EVERY_SECONDS - 1, [again]), (EVERY_SECONDS, [])):
        body = to_json(drop_message(again if later else found)).decode()
        mini.run(handle_dead_letter(mini.deployment, body, now + later))
        assert receive_messages(mini) == expected
    assert swept(mini) == [found]


@pytest.mark.parametrize(
    "message", [{"kind": "drop"}, {"kind": "drop", "bucket": 5}, {"kind": "sweep", "after": 5}]
)
def test_a_malformed_message_is_ignored(message: dict[str, object]) -> None:
    """The result contains the reason."""
    [ignored] = parse_control(to_json(message).decode())
    assert isinstance(ignored, Ignored)
    assert "not a Tidemill message: " in ignored.reason


def test_the_schedule_of_a_day_has_the_control_lambda_sweep(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper Lambda requests it, the control Lambda lists the uploads."""
    for name, value in mini.environment.items():
        monkeypatch.setenv(name, value)
    deployment.cache_clear()
    reaper._aws.cache_clear()
    mini.put(lines_of(1))
    reaper.handler({"sweep": True}, LocalLambdaContext("reaper", 900))
    deployment.cache_clear()
    reaper._aws.cache_clear()
    assert receive_messages(mini) == [Sweep()]
    monkeypatch.setattr("tidemill.handler.control.sweep.SETTLED_SECONDS", -60)
    body = to_json(sweep_message()).decode()
    control.handle_message(mini.aws, mini.deployment, body, plenty)
    assert [drop.key for drop in receive_messages(mini) if isinstance(drop, Drop)] == [
        "input/x.jsonl"
    ]
