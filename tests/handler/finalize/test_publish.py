"""Output and error objects: made once, part by part, by as many runs as it takes."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import pytest
from pydantic_core import from_json

from tests.handler.finalize.rig import Cloud, Drop, plenty, row_of
from tests.handler.killing import is_killed_after
from tidemill.batch.result_kinds import OUTPUT
from tidemill.batch.states import Status
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.objects.upload_plan import UploadLimits
from tidemill.handler.errors import NotThere
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.finalize.publish import publish
from tidemill.handler.lifecycle.batch_lock import BatchLock, LockLost, Requeue
from tidemill.handler.lifecycle.finish import end

MIB = 2**20


def spy(cloud: Cloud) -> Counter[str]:
    """Count the requests to S3 by name, and the bytes that are sent as parts."""
    counts: Counter[str] = Counter()

    class Counting:
        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            counts[name] += 1
            send = getattr(self._client, name)
            return partial(self._upload_part, send) if name == "upload_part" else send

        def _upload_part(self, send: Any, Body: Any, **where: Any) -> Any:  # noqa: N803
            counts["bytes sent"] += Body.seek(0, io.SEEK_END)
            Body.seek(0)
            return send(Body=Body, **where)

    cloud.aws.clients = {**cloud.aws.clients, "s3": Counting(cloud.aws.clients["s3"])}
    return counts


def large(cloud: Cloud, num_shards: int, *sizes: int) -> Drop:
    """Return a batch that finalizes, with rows of these sizes in turn, a size a shard."""
    drop = cloud.drop(4 * num_shards).begin()
    for number in range(num_shards):
        drop.run_shard(number, size=sizes[number % len(sizes)])
    return drop.move(Status.FINALIZING, outcome="completed")


def expected(drop: Drop, sizes: tuple[int, ...]) -> bytes:
    """Return the output object that such a batch must have."""
    rows = [row_of(n, sizes[(n - 1) // 4 % len(sizes)]) for n in range(1, len(drop.lines) + 1)]
    return b"".join(row.row for row in rows if row.is_success)


def ticks(number: int) -> Callable[[], float]:
    """Return a clock on which the time is over after a number of looks."""
    rest = iter(range(number, 0, -1))
    return lambda: 100.0 if next(rest, 0) else 0.0


def test_large_segments_are_copied_and_small_ones_joined(cloud: Cloud) -> None:
    """The object is the segments in order, whatever parts they came in."""
    sizes = (3 * MIB, 10, 2 * MIB, MIB)
    drop = large(cloud, 6, *sizes)
    counts = spy(cloud)
    drop.finish()
    output = cloud.read(drop.batch.outputs.output_key)
    assert output == expected(drop, sizes)
    # Output: 9 MiB; a few bytes and 6 MiB; 3 MiB and 2 of 9; the other 7; a few bytes.
    # Errors: 3 MiB, a few bytes and 2 MiB; 1 and 3 MiB and a few bytes.
    assert counts["upload_part_copy"] == 3
    assert counts["upload_part"] == 2 + 2
    num_errors = len(cloud.read(drop.batch.outputs.error_key) or b"")
    assert 0 <= counts["bytes sent"] - num_errors - (6 + 5) * MIB < 1000
    head = cloud.run(cloud.deployment.bucket.head(drop.batch.outputs.output_key))
    assert head["ETag"].strip('"').endswith("-5")
    assert head["Metadata"] == {"batch-id": drop.id}


def test_another_run_goes_on_with_the_parts_that_are_there(mini: Cloud) -> None:
    """Every part is sent once, however many runs it takes."""
    drop = large(mini, 6, 3 * MIB)
    counts = spy(mini)
    num_runs = 0
    while not drop.batch.is_terminal:
        drop.finalize(ticks(3))
        num_runs += 1
    assert num_runs > 3
    assert counts["create_multipart_upload"] == 2
    # Of the errors, 3 MiB a shard, two make a part.
    assert (counts["upload_part_copy"], counts["upload_part"]) == (6, 3)
    assert counts["complete_multipart_upload"] == 2
    assert mini.read(drop.batch.outputs.output_key) == expected(drop, (3 * MIB,))


def test_an_older_object_of_the_same_size_is_not_taken_for_ours(mini: Cloud) -> None:
    """The object's metadata names its owner: a newer upload's output replaces an equal one."""
    for number in (1, 2):
        drop = large(mini, 1, 10)
        drop.finish()
        key = drop.batch.outputs.output_key
        assert mini.run(mini.deployment.bucket.head(key))["Metadata"] == {"batch-id": drop.id}
        assert mini.versions(key) == number


def test_an_aborted_upload_is_started_again(mini: Cloud) -> None:
    """A lifecycle rule may abort a slow upload; the object is published all the same."""
    drop = large(mini, 4, 3 * MIB)
    drop.finalize(ticks(3))
    upload_id = drop.batch.output_joining
    assert upload_id is not None
    key = drop.batch.outputs.output_key
    mini.run(mini.deployment.bucket.abort_upload(key, upload_id))
    drop.finish()
    assert drop.batch.output_joining != upload_id
    assert mini.read(key) == expected(drop, (3 * MIB,))
    assert mini.versions(key) == 1


def test_one_of_two_uploads_is_aborted(cloud: Cloud) -> None:
    """A run that finds another's upload in the batch aborts its own and continues with that one."""
    drop = large(cloud, 2, 100)
    stale = BatchLock(cloud.aws, cloud.deployment, drop.batch, plenty)
    key = drop.batch.outputs.output_key
    first = cloud.run(cloud.deployment.bucket.create_upload(key, {"batch-id": drop.id}))
    cloud.run(cloud.deployment.table.set_once(drop.id, "output_joining", first))
    stale.acquire()
    publish(stale)
    stale.release()
    assert cloud.read(key) == expected(drop, (100,))
    uploads = cloud.aws.clients["s3"].list_multipart_uploads(Bucket=cloud.deployment.bucket.name)
    assert uploads.get("Uploads", []) == []


def test_a_run_that_was_held_up_writes_over_nothing(mini: Cloud) -> None:
    """When the batch has ended and a newer one published, an old run finds its upload gone."""
    older = large(mini, 1, 10)
    held_up = BatchLock(mini.aws, mini.deployment, older.batch, plenty)
    older.finish()
    held_up.batch = replace(held_up.batch, output_joining=older.batch.output_joining)
    newer = large(mini, 2, 20)
    newer.finish()
    with pytest.raises(LockLost):
        publish(held_up)
    assert mini.read(newer.batch.outputs.output_key) == expected(newer, (20,))


def test_a_missing_segment_is_an_error_without_an_endless_loop(mini: Cloud) -> None:
    """Without its rows nothing is published, and the message fails."""
    drop = large(mini, 2, 10)
    lock = BatchLock(mini.aws, mini.deployment, drop.batch, plenty)
    assert lock.acquire()
    mini.run(mini.deployment.bucket.delete(OUTPUT.segments_of(drop.shard(0))[0].key))
    with pytest.raises(NotThere):
        publish(lock)
    assert drop.result("output") is None
    assert drop.batch.final is None


def test_waiting_for_an_older_batch_grows_longer(mini: Cloud) -> None:
    """The first looks come soon, later ones once a minute at the latest."""
    older = mini.drop(4)
    newer = large(mini, 1, 10)
    assert newer.batch.predecessor == older.id
    delays = []
    for waited_seconds in (0, 80, 3600):
        now = (newer.batch.finalizing_at or 0) + waited_seconds
        lock = BatchLock(
            mini.aws, mini.deployment, newer.batch, plenty, now=lambda at=now: float(at)
        )
        assert lock.acquire()
        with pytest.raises(Requeue) as pause:
            publish(lock)
        delays.append(pause.value.delay_seconds)
    assert delays == [1, 10, 60]


def test_a_batch_waits_for_those_before_one_that_published_nothing(mini: Cloud) -> None:
    """Otherwise the oldest, which winds up still, would write its rows over the newest ones."""
    oldest = large(mini, 1, 10)
    between = mini.drop(4)
    newest = large(mini, 1, 10)
    mini.run(end(mini.deployment, between.id, Status.FAILED, int(time.time())))
    lock = BatchLock(mini.aws, mini.deployment, newest.batch, plenty)
    assert lock.acquire()
    with pytest.raises(Requeue):
        publish(lock)
    oldest.finish()
    publish(lock)
    assert newest.batch.final is not None


def test_rows_are_lines_of_json(cloud: Cloud) -> None:
    """A downloaded object can be parsed line by line."""
    drop = large(cloud, 3, 10)
    drop.finish()
    data = cloud.read(drop.batch.outputs.output_key) or b""
    assert data.endswith(b"\n")
    assert [from_json(line)["status"] for line in data.splitlines()] == [200] * 9


def joined_keys(drop: Drop) -> list[str]:
    """Return the keys of what segments have become on their way."""
    keys = drop.cloud.run(drop.cloud.deployment.bucket.list_keys(f"work/{drop.id}/joined/"))
    assert isinstance(keys, list)
    return keys


def test_more_segments_than_an_upload_has_parts_are_joined_twice(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are copied only, of allowed sizes, if a small segment ends a group."""
    limits = UploadLimits(max_parts=5)
    monkeypatch.setattr("tidemill.handler.aws.objects.join.S3_LIMITS", limits)
    sizes = (4 * MIB, 10)
    drop = large(cloud, 6, *sizes)
    counts = spy(cloud)
    drop.finish()
    output = cloud.read(drop.batch.outputs.output_key)
    assert output == expected(drop, sizes)
    # Three times 12 MiB and a few bytes. Errors, which are small, need one upload only.
    assert [key.split("/")[3].partition("-")[0] for key in joined_keys(drop)] == ["output"] * 3
    assert counts["upload_part_copy"] == 6 + 3
    assert counts["upload_part"] == 2
    assert counts["bytes sent"] == len(cloud.read(drop.batch.outputs.error_key) or b"")


def test_a_run_that_joins_twice_may_die_at_any_moment(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between any two requests: the object is the same, and whole groups are kept."""
    limits = UploadLimits(min_part_bytes=200, max_parts=8, group_bytes=400)
    monkeypatch.setattr("tidemill.handler.aws.objects.join.S3_LIMITS", limits)
    monkeypatch.setattr("tidemill.handler.aws.objects.join._NUM_THREADS", 1)
    sizes = (100, 10, 60)
    drop = large(mini, 9, *sizes)
    num_killed = 0
    counts = spy(mini)
    num_runs = 0
    while not drop.batch.is_terminal:
        # The turn of the dead lapses.
        mini.run(mini.deployment.table.change_batch(drop.id, drop.batch.status, turn_until=0))
        run = partial(finalize, mini.aws, mini.deployment, drop.batch, plenty)
        num_killed += is_killed_after(18 + num_runs, mini.aws, run)
        num_runs += 1
    assert mini.read(drop.batch.outputs.output_key) == expected(drop, sizes)
    assert mini.versions(drop.batch.outputs.output_key) == 1
    assert num_killed > 1
    assert len(joined_keys(drop)) > 3
    assert counts["complete_multipart_upload"] <= len(joined_keys(drop)) + 2


def test_time_that_is_over_leaves_no_upload_of_a_group_behind(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is not whole is given up, and the next run makes it; whole ones are kept."""
    limits = UploadLimits(min_part_bytes=200, max_parts=8, group_bytes=400)
    monkeypatch.setattr("tidemill.handler.aws.objects.join.S3_LIMITS", limits)
    sizes = (100, 10, 60)
    drop = large(mini, 9, *sizes)
    lock = BatchLock(mini.aws, mini.deployment, drop.batch, plenty)
    assert lock.acquire()
    is_over, copy_part = Event(), Bucket.copy_part

    def copy_slowly(*arguments: Any) -> Any:
        lock.time_left = lambda: 0.0
        assert is_over.wait(120)
        return copy_part(*arguments)

    class Over(Event):
        def set(self) -> None:
            super().set()
            is_over.set()

    with monkeypatch.context() as patches:
        patches.setattr(Bucket, "copy_part", copy_slowly)
        patches.setattr("tidemill.handler.aws.objects.join.Event", Over)
        with pytest.raises(Requeue):
            publish(lock)
    uploads = mini.aws.clients["s3"].list_multipart_uploads(Bucket=mini.deployment.bucket.name)
    assert uploads.get("Uploads", []) == []
    lock.release()
    drop.finish()
    assert mini.read(drop.batch.outputs.output_key) == expected(drop, sizes)
