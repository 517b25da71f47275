"""Shards that no worker will finish."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.handler.finalize.rig import Cloud, Drop, plenty
from tidemill.batch.model import Options, Shard, ShardStatus
from tidemill.batch.object_keys import fill_key, part_key
from tidemill.batch.parts import FinishedRow, encode_part
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import advance_message
from tidemill.handler.errors import LeaseLost
from tidemill.handler.finalize.close import close_settled, skip_reason


def test_a_lease_is_respected_for_a_while(mini: Cloud) -> None:
    """A shard whose worker may not have noticed yet waits; all others are already closed."""
    drop = mini.drop(12).begin()
    drop.claim(0, lease_seconds=60)
    drop.claim(1)
    drop.move(Status.CANCELLING)
    assert drop.finalize() == [advance_message(drop.id)]
    assert drop.shard(0).status is ShardStatus.PENDING
    assert drop.shard(1).status is ShardStatus.DONE
    assert drop.batch.status is Status.CANCELLING


def test_a_worker_that_hands_its_rows_in_is_waited_for(mini: Cloud) -> None:
    """Rows that a worker flushes after the cancel, and before it lets go, are in the output."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0, lease_seconds=60)
    drop.move(Status.CANCELLING).finalize()
    drop.put_rows(shard, [1, 3])
    progress = replace(shard.progress, gpu_seconds=2.5)
    mini.run(
        mini.deployment.table.release(
            shard, progress=progress, suspects=(), quarantined=(), attempts=0
        )
    )
    drop.finish()
    assert drop.ids("output") == ["c1", "c3"]
    assert drop.progress.gpu_seconds == 2.5


def test_a_worker_that_never_lets_go_loses_its_shard(cloud: Cloud) -> None:
    """After some seconds its lease is ignored: later writes of the worker have no effect."""
    drop = cloud.drop(4).begin()
    zombie = drop.claim(0, lease_seconds=3600)
    drop.put_rows(zombie, [1])
    drop.move(Status.CANCELLING, ago_seconds=9).finish()
    drop.put_rows(zombie, [1, 2, 3])
    with pytest.raises(LeaseLost):
        cloud.run(
            cloud.deployment.table.commit(
                zombie, progress=zombie.progress, output_sizes=[99], error_sizes=[]
            )
        )
    assert drop.ids("output") == ["c1"]
    assert drop.shard(0).output_sizes == (len(cloud.read(drop.batch.outputs.output_key) or b""),)


def test_rows_of_several_owners_count_once(mini: Cloud) -> None:
    """The first of overlapping parts counts for a line; only missing rows are filled in."""
    drop = mini.drop(4, options=Options(echo_fields=("url",))).begin()
    first, second = drop.claim(0), drop.claim(0)
    drop.put_rows(second, [1, 2])
    drop.put_rows(first, [2, 4])
    drop.move(Status.FINALIZING, outcome="expired").finish()
    assert (drop.result("error") or [{}])[0]["url"] == "/v1/completions"
    assert (drop.ids("output"), drop.ids("error")) == (["c1", "c2"], ["c3", "c4"])
    assert (drop.progress.completed, drop.progress.failed) == (2, 1)


def test_invalid_lines_get_a_row_with_their_error(mini: Cloud) -> None:
    """Numbers count blank lines and a byte order mark is dropped, as for a worker."""
    drop = mini.drop(2)
    data = b'\xef\xbb\xbf{"custom_id": "a", "url": "/v1/x", "body": {}}\n\n \nnonsense\n'
    bucket = mini.deployment.bucket.name
    put = mini.aws.clients["s3"].put_object(Bucket=bucket, Key="input/x.jsonl", Body=data)
    source = replace(
        drop.batch.source,
        etag=put["ETag"],
        version_id=put["VersionId"],
        num_bytes=len(data),
    )
    shard = replace(drop.shard(0), num_rows=2, end=len(data))
    drop = _with(mini, drop, source.etag, source.version_id, shard)
    drop.move(Status.FINALIZING, outcome="expired").finish()
    rows = drop.result("error") or []
    assert [row["error"]["code"] for row in rows] == ["batch_expired", "invalid_json_line"]
    assert [row["custom_id"] for row in rows] == ["a", None]
    assert rows[1]["error"]["line"] == 4
    assert drop.progress.failed == 1


def _with(cloud: Cloud, drop: Drop, etag: str, version_id: str | None, shard: Shard) -> Drop:
    """Return another batch like this one over another object, with one separate shard."""
    source = replace(drop.batch.source, etag=etag, version_id=version_id)
    batch = replace(drop.batch, id=f"{drop.id}x", source=source, predecessor=None)
    cloud.run(cloud.deployment.table.create_batch(batch))
    cloud.run(cloud.deployment.table.put_shard(replace(shard, batch_id=batch.id)))
    other = Drop(cloud, batch.id, drop.lines)
    return other.begin()


def test_an_input_that_is_unreadable_is_reported(mini: Cloud) -> None:
    """Finished lines have rows, the others have none, and the errors give the reason."""
    drop = mini.drop(8).begin()
    drop.run_shard(0)
    drop.put_rows(drop.claim(1), [5])
    source = drop.batch.source
    mini.aws.clients["s3"].delete_object(
        Bucket=source.bucket, Key=source.key, VersionId=source.version_id
    )
    drop.move(Status.FINALIZING, outcome="expired").finish()
    assert (drop.ids("output"), drop.ids("error")) == (["c1", "c2", "c3", "c5"], ["c4"])
    (error,) = drop.report()["errors"]["data"]
    assert (error["code"], error["line"]) == ("shard_failed", 5)
    assert "can no longer be read" in error["message"]


def test_foreign_bytes_do_not_stop_the_batch(mini: Cloud) -> None:
    """Foreign bytes among the parts are left out, and the other rows are there."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0)
    drop.put_rows(shard, [1])
    mini.run(mini.deployment.bucket.put(part_key(drop.id, 0, 0, 0), b"nonsense"))
    drop.move(Status.CANCELLING).finish()
    assert drop.ids("output") == ["c1"]


def test_rows_that_a_dead_run_filled_in_are_not_counted_as_failures(mini: Cloud) -> None:
    """Rows filled in by a run before it died are written again, and count the same."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0)
    drop.put_rows(shard, [4])
    filled = encode_part(FinishedRow(line, b"{}\n", is_success=False) for line in (1, 2, 3))
    mini.run(mini.deployment.bucket.put(fill_key(drop.id, 0, shard.fence), filled))
    drop.move(Status.FINALIZING, outcome="expired").finish()
    assert drop.ids("error") == ["c1", "c2", "c3", "c4"]
    assert (drop.progress.completed, drop.progress.failed) == (0, 1)


def test_an_abandoned_shard_is_closed_while_the_batch_runs(cloud: Cloud) -> None:
    """Its lines get rows that say why and count as failed; the batch goes on and is completed."""
    drop = cloud.drop(8).begin()
    drop.put_rows(drop.claim(0), [1])
    cloud.run(cloud.deployment.table.abandon(drop.id, 0, "Five runs of it ended without a row."))
    close_settled(cloud.aws, cloud.deployment, drop.batch, plenty)
    assert cloud.messages(wait_seconds=10) == [advance_message(drop.id)]
    assert (drop.batch.status, drop.num_left) == (Status.IN_PROGRESS, 1)
    close_settled(cloud.aws, cloud.deployment, drop.batch, plenty)
    assert cloud.messages() == []
    drop.run_shard(1)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    assert (drop.ids("output"), drop.ids("error")) == (
        ["c1", "c5", "c6", "c7"],
        ["c2", "c3", "c4", "c8"],
    )
    rows = drop.result("error") or []
    assert rows[0]["error"] == {
        "code": "shard_failed",
        "message": "Five runs of it ended without a row.",
    }
    assert drop.report()["request_counts"] == {"total": 8, "completed": 4, "failed": 4}
    (error,) = drop.report()["errors"]["data"]
    assert (error["code"], error["line"]) == ("shard_failed", 1)


def test_an_abandoned_shard_that_is_held_is_looked_at_again(mini: Cloud) -> None:
    """No lease is taken over while the batch runs; a message comes when it has ended."""
    drop = mini.drop(4).begin()
    drop.claim(0, lease_seconds=2)
    mini.run(mini.deployment.table.abandon(drop.id, 0, "given up"))
    close_settled(mini.aws, mini.deployment, drop.batch, plenty)
    assert drop.shard(0).status is ShardStatus.PENDING
    assert mini.messages() == []
    assert mini.messages(wait_seconds=20) == [advance_message(drop.id)]
    close_settled(mini.aws, mini.deployment, drop.batch, plenty, now=lambda: time.time() + 60)
    assert drop.shard(0).status is ShardStatus.DONE


def test_closing_without_time_is_left_to_another_run(mini: Cloud) -> None:
    """A run that is nearly over closes nothing and rings."""
    drop = mini.drop(4).begin()
    drop.claim(0)
    mini.run(mini.deployment.table.abandon(drop.id, 0, "given up"))
    close_settled(mini.aws, mini.deployment, drop.batch, lambda: 1.0)
    assert drop.shard(0).status is ShardStatus.PENDING
    assert mini.messages(wait_seconds=10) == [advance_message(drop.id)]


def test_what_a_line_gets_depends_on_why_it_was_not_run(mini: Cloud) -> None:
    """Nothing when the batch was cancelled or failed, else a row; given up goes before expired."""
    batch = replace(mini.drop(4).batch, status=Status.FINALIZING)
    shard = Shard(batch.id, 0, 1, 4, 0, 10)
    given_up = replace(shard, abandoned="given up")
    for outcome in (Status.EXPIRED, Status.COMPLETED):
        reason = skip_reason(replace(batch, outcome=outcome), given_up)
        assert reason is not None
        assert (reason.code, reason.message, reason.is_failure) == (
            "shard_failed",
            "given up",
            True,
        )
    expired = skip_reason(replace(batch, outcome=Status.EXPIRED), shard)
    assert expired is not None
    assert (expired.code, expired.is_failure) == ("batch_expired", False)
    assert skip_reason(replace(batch, outcome=Status.FAILED), given_up) is None
    assert skip_reason(replace(batch, status=Status.CANCELLING), given_up) is None
