"""Erasure: nothing is left of a batch but its tombstone, and nothing of another is touched."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.emulators import Emulator, active_ids
from tests.handler.finalize.rig import Cloud, Drop, plenty
from tests.handler.killing import is_killed_after
from tests.long_parameters import with_long
from tidemill.batch.model import Options, Shard, Source
from tidemill.batch.object_keys import results_prefix, upload_prefix
from tidemill.batch.states import Status
from tidemill.batch.stored_file import Upload
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.items import dump
from tidemill.handler.aws.queues import LAMBDA_SECONDS, advance_message
from tidemill.handler.aws.stores.table import erasing_name
from tidemill.handler.control.advance import advance
from tidemill.handler.control.dead_letters import handle_dead_letter
from tidemill.handler.control.erase import erase
from tidemill.handler.control.reaper import STUCK_SECONDS, reap
from tidemill.handler.errors import ConditionFailed
from tidemill.handler.lifecycle.erasure import NotErasable, request_erasure

NOW = int(time.time())


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a deployment that erases, on each emulator in turn."""
    return Cloud.on(emulator, erase_batches="1")


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return such a deployment on one emulator."""
    return Cloud.on(ministack, erase_batches="1")


def ended(cloud: Cloud, **dropped: Any) -> Drop:
    """Return a batch that is completed, of eight lines of which two have failed."""
    drop = cloud.drop(8, options=Options(metadata={"who": "Ada"}), **dropped).begin()
    for number in range(drop.num_shards):
        drop.run_shard(number)
    advance(cloud.aws, cloud.deployment, drop.id, plenty)
    drop.finish()
    cloud.messages()
    return drop


def request(cloud: Cloud, drop: Drop) -> None:
    """Ask for the erasure of a batch."""
    cloud.run(request_erasure(cloud.deployment, drop.batch, NOW))


def later() -> float:
    """Return when nothing writes for a batch any more that has ended now."""
    return time.time() + LAMBDA_SECONDS + 60


def run(cloud: Cloud, drop: Drop) -> None:
    """Run the control Lambda with the message, once no process can write any more."""
    advance(cloud.aws, cloud.deployment, drop.id, plenty, now=later)


def everything(cloud: Cloud) -> tuple[set[str], list[dict[str, Any]]]:
    """Return the keys of all versions in the bucket, and all items of the table."""
    listed = cloud.aws.clients["s3"].list_object_versions(Bucket=cloud.deployment.bucket.name)
    scanned = cloud.aws.clients["dynamodb"].scan(TableName=cloud.deployment.table.name)
    return {version["Key"] for version in listed.get("Versions", ())}, scanned["Items"]


def test_a_tombstone_remains(cloud: Cloud) -> None:
    """It has ID, times and counts, but no file name, no text of the client, and no row."""
    drop = ended(cloud)
    before = drop.batch
    assert len(everything(cloud)[0]) > 4
    request(cloud, drop)
    assert cloud.messages() == [advance_message(drop.id)]
    assert drop.batch.erased_at is None
    run(cloud, drop)
    keys, items = everything(cloud)
    assert keys == set()
    kinds = sorted({item["pk"]["S"].partition("#")[0] for item in items})
    assert kinds == ["BATCH", "FILE", "USAGE", "USAGE_OF"]
    assert [item["sk"]["S"] for item in items if item["pk"]["S"] == f"BATCH#{drop.id}"] == ["META"]
    assert "Ada" not in str(items)
    assert "x.jsonl" not in str(items)
    after = drop.batch
    assert after == after.tombstone
    assert (after.erasing_at, after.erased_at is not None) == (NOW, True)
    assert (after.created_at, after.completed_at) == (before.created_at, before.completed_at)
    assert (after.final, after.expires) == (before.final, before.expires)
    request(cloud, drop)
    assert drop.batch == after
    assert cloud.messages() == []


def test_what_later_batches_would_reuse_goes_too(mini: Cloud) -> None:
    """Only this batch's stored results are deleted; those of the tenant's other batches stay."""
    drop = ended(mini)
    prefix = results_prefix(drop.batch.tenant)
    own, other = (f"{prefix}model/00ff/{batch}-0000000.3" for batch in (drop.id, "batch_other"))
    for key in (own, own, other):
        mini.run(mini.deployment.bucket.put(key, b"kept"))
    request(mini, drop)
    run(mini, drop)
    assert drop.batch.erased_at is not None
    assert everything(mini)[0] == {other}


def test_what_is_written_after_the_end_goes_too(cloud: Cloud) -> None:
    """Everything is checked again when no run may still write; only then is the batch erased."""
    drop = ended(cloud)
    request(cloud, drop)
    cloud.messages()
    advance(cloud.aws, cloud.deployment, drop.id, plenty)
    assert everything(cloud)[0] == set()
    assert drop.batch.erased_at is None
    assert cloud.run(cloud.deployment.control.count()) == 1
    cloud.run(cloud.deployment.bucket.put(f"work/{drop.id}/intake/scan-3", b"late"))
    cloud.run(cloud.deployment.table.put_shard(Shard(drop.id, 9, 1, 1, 0, 9)))
    run(cloud, drop)
    assert everything(cloud)[0] == set()
    assert drop.batch.erased_at is not None
    assert cloud.run(cloud.deployment.table.page_of_items(drop.batch, 500)) == []


def test_an_erasure_whose_message_was_lost_is_done(mini: Cloud) -> None:
    """The reaper knows of it until it is done."""
    drop = ended(mini)
    request(mini, drop)
    mini.messages()
    for seconds in (0, STUCK_SECONDS + 1):
        assert mini.messages() == []
        reap(mini.aws, mini.deployment, NOW + seconds)
    assert mini.messages() == [advance_message(drop.id)]
    run(mini, drop)
    assert drop.batch.erased_at is not None
    assert mini.run(active_ids(mini.deployment.table)) == []
    # The run that buries it may die before it has taken it off the list.
    listed = {"pk": {"S": "ACTIVE"}, "sk": {"S": erasing_name(drop.batch)}}
    mini.aws.clients["dynamodb"].put_item(TableName=mini.deployment.table.name, Item=listed)
    reap(mini.aws, mini.deployment, NOW)
    assert mini.run(active_ids(mini.deployment.table)) == []


def test_an_input_stays_while_another_batch_reads_it(mini: Cloud) -> None:
    """It also stays if the other batch began to read it after the request was accepted."""
    drop = ended(mini)
    request(mini, drop)
    reader = mini.drop(4, key="input/y.jsonl")
    source = {name: getattr(drop.batch.source, name) for name in drop.batch.source.__slots__}
    mini.run(mini.deployment.table.change_batch(reader.id, Status.VALIDATING, source=source))
    run(mini, drop)
    assert drop.batch.erased_at is None
    assert mini.versions("input/x.jsonl") == 1
    assert mini.versions(drop.batch.outputs.output_key) == 0
    reader.move(Status.FAILED)
    run(mini, drop)
    assert drop.batch.erased_at is not None
    assert mini.versions("input/x.jsonl") == 0


def test_the_parts_of_an_input_go_with_it(cloud: Cloud) -> None:
    """They are deleted with the client's file name, but no others, whatever a drop names."""
    drop = ended(cloud)
    kept, gone = "upload_1", "upload_2"
    bucket, s3 = cloud.deployment.bucket, cloud.aws.clients["s3"]
    for upload_id in (kept, gone):
        upload = Upload(upload_id, "owner", 4, "Ada.jsonl", "batch", NOW, NOW, "file-1")
        cloud.run(cloud.deployment.uploads.create_upload(upload))
        cloud.run(bucket.put(f"{upload_prefix(upload_id)}part_1", b"Ada"))
        cloud.run(bucket.delete(f"{upload_prefix(upload_id)}part_1"))
    for key, upload_id in (("input/w.jsonl", kept), ("files/owner/file-1", gone)):
        drop = ended(cloud, key="input/z.jsonl")
        put = s3.put_object(
            Bucket=bucket.name, Key=key, Body=b"Ada", Metadata={"upload-id": upload_id}
        )
        source = dump(Source(bucket.name, key, put["ETag"], 3, put["VersionId"]))
        cloud.run(cloud.deployment.table.change_batch(drop.id, Status.COMPLETED, source=source))
        request(cloud, drop)
        run(cloud, drop)
        assert cloud.versions(key) == 0
    assert cloud.versions(f"{upload_prefix(kept)}part_1") == 1
    assert cloud.versions(f"{upload_prefix(gone)}part_1") == 0
    assert cloud.run(cloud.deployment.uploads.get_upload(kept)) is not None
    assert cloud.run(cloud.deployment.uploads.get_upload(gone)) is None


def test_versions_of_another_time_are_not_checked(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is uploaded every hour has thousands of them."""
    drop = ended(mini)
    request(mini, drop)
    long_ago = NOW - 86_400
    aged = replace(drop.batch, created_at=long_ago, ended_at=long_ago + 60, turn_until=0.0)
    monkeypatch.delattr(Bucket, "head")
    erase(mini.aws, mini.deployment, aged, plenty, now=lambda: long_ago + 60)
    assert mini.versions(drop.batch.outputs.output_key) == 1


def test_versions_are_looked_through_as_far_as_time_allows(mini: Cloud) -> None:
    """The rest is left to another run."""
    drop = ended(mini)
    for _ in range(3):
        mini.run(mini.deployment.bucket.put(drop.batch.outputs.output_key, b"x"))
    request(mini, drop)
    mini.messages()
    times = iter([600.0] * 4 + [0.0] * 100)
    erase(mini.aws, mini.deployment, drop.batch, lambda: next(times), now=later)
    assert drop.batch.erased_at is None
    assert next(times) == 0.0
    assert len(list(times)) == 98
    assert mini.messages() == [advance_message(drop.id)]


def test_another_upload_of_the_name_keeps_what_is_its_own(cloud: Cloud) -> None:
    """Older or newer; what was replaced does not show again where the newest goes."""
    older, newer = ended(cloud, sequencer="01"), ended(cloud, sequencer="02")
    results = newer.batch.outputs.output_key, newer.batch.outputs.report_key
    request(cloud, older)
    run(cloud, older)
    assert newer.report()["id"] == newer.id
    assert newer.ids("output") == ["c1", "c2", "c3", "c5", "c6", "c7"]
    assert cloud.versions("input/x.jsonl") == 1
    assert [cloud.versions(key) for key in results] == [1, 1]
    table, source = cloud.deployment.table, newer.batch.source
    assert cloud.run(table.newest_drop(source.bucket, newer.batch.outputs)) == newer.id

    newest = ended(cloud, sequencer="03")
    request(cloud, newest)
    run(cloud, newest)
    assert cloud.read("input/x.jsonl") is None
    assert [cloud.read(key) for key in results] == [None, None]
    assert cloud.versions("input/x.jsonl") == 1
    assert [cloud.versions(key) for key in results] == [1, 1]


@pytest.mark.parametrize("stride", with_long([7], [1]))
def test_the_run_that_erases_may_die_at_any_moment(mini: Cloud, stride: int) -> None:
    """The message that comes again goes on where it was, in any number of runs."""
    num_calls, was_killed = 0, True
    while was_killed:
        drop = ended(mini, key=f"input/{num_calls}.jsonl")
        request(mini, drop)
        was_killed = is_killed_after(num_calls, mini.aws, partial(run, mini, drop))
        run(mini, drop)
        assert drop.batch.erased_at is not None
        assert everything(mini)[0] == set()
        num_calls += stride
    assert num_calls > 20


def test_what_the_time_does_not_allow_is_left_to_another_run(mini: Cloud) -> None:
    """A message requests the rest; it is also retried from the dead-letter queue."""
    drop = ended(mini)
    request(mini, drop)
    mini.messages()
    advance(mini.aws, mini.deployment, drop.id, lambda: 0.0)
    assert drop.batch.erased_at is None
    assert mini.messages() == [advance_message(drop.id)]
    body = f'{{"kind": "advance", "batch_id": "{drop.id}"}}'
    mini.run(handle_dead_letter(mini.deployment, body, NOW))
    assert mini.run(mini.deployment.control.count()) == 1
    run(mini, drop)
    assert drop.batch.erased_at is not None


def test_an_end_is_announced_and_counted_once(mini: Cloud) -> None:
    """A tombstone has nothing of what was read before another run had announced the end."""
    drop = ended(mini)
    request(mini, drop)
    stale = replace(drop.batch, announced=Status.FINALIZING, queued_lines=8)
    erase(mini.aws, mini.deployment, stale, plenty, now=later)
    assert (drop.batch.announced, drop.batch.queued_lines) == (Status.COMPLETED, None)
    assert drop.batch.erased_at is not None

    drop = ended(mini, key="input/y.jsonl")
    mini.run(mini.deployment.table.change_batch(drop.id, Status.COMPLETED, queued_lines=8))
    request(mini, drop)
    with pytest.raises(ConditionFailed):
        mini.run(mini.deployment.table.bury(drop.batch))
    erase(mini.aws, mini.deployment, drop.batch, plenty, now=later)
    assert drop.batch.erased_at is None
    run(mini, drop)
    assert (drop.batch.erased_at is not None, drop.batch.queued_lines) == (True, None)
    assert mini.run(mini.deployment.usage.count_lines("owner")) == -8


def test_only_what_has_ended_is_erased(mini: Cloud) -> None:
    """An input that another batch reads stays, as does everything if erasure is not enabled."""
    drop = mini.drop(4).begin()
    with pytest.raises(
        NotErasable, match="in_progress: only an ended batch can be erased"
    ) as refused:
        request(mini, drop)
    assert refused.value.code == "batch_not_ended"
    drop.move(Status.CANCELLING).move(Status.CANCELLED)
    reader = mini.drop(4, key="input/y.jsonl")
    table = mini.deployment.table
    source = {name: getattr(drop.batch.source, name) for name in drop.batch.source.__slots__}
    mini.run(table.change_batch(reader.id, Status.VALIDATING, source=source))
    with pytest.raises(NotErasable, match=f"{reader.id} still reads the input") as refused:
        request(mini, drop)
    assert refused.value.code == "input_in_use"
    reader.move(Status.FAILED)
    request(mini, drop)
    assert drop.batch.erasing_at == NOW


def test_a_pending_webhook_is_delivered_first(mini: Cloud) -> None:
    """The webhook must be delivered or have failed: its receiver waits for it."""
    drop = ended(mini)
    change = mini.deployment.table.change_batch
    mini.run(change(drop.id, Status.COMPLETED, webhook_delivery="pending"))
    with pytest.raises(NotErasable, match="is still pending") as refused:
        request(mini, drop)
    assert refused.value.code == "webhook_pending"
    assert drop.batch.erasing_at is None
    mini.run(change(drop.id, Status.COMPLETED, webhook_delivery="failed"))
    request(mini, drop)
    assert drop.batch.erasing_at == NOW


def test_a_deployment_that_does_not_say_so_erases_nothing(ministack: Emulator) -> None:
    """The right to delete for good is one that its Lambdas do not have."""
    cloud = Cloud.on(ministack)
    drop = ended(cloud)
    with pytest.raises(NotErasable, match="erase_batches = true") as refused:
        request(cloud, drop)
    assert refused.value.code == "erasing_not_allowed"
    run(cloud, drop)
    assert drop.batch.erasing_at is None
    assert drop.ids("output")
