"""Batches that wind up: what is published, what the Batch and its report say, and how they end."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from openai.types import Batch as OpenAIBatch

from tests.emulators import active_ids
from tests.handler.finalize.rig import Cloud, plenty
from tests.handler.killing import is_killed_after
from tests.long_parameters import with_long
from tidemill.batch.model import Batch, BatchError, Options
from tidemill.batch.parts import EXPIRED_MESSAGE
from tidemill.batch.states import Status
from tidemill.handler.aws.bucket import SHORT_LIVED
from tidemill.handler.errors import AwsError
from tidemill.handler.finalize.finalize import finalize
from tidemill.handler.lifecycle.batch_lock import BatchLock
from tidemill.handler.lifecycle.finish import end_batch


def ids(*lines: int) -> list[str]:
    """Return the custom ids of lines."""
    return [f"c{line}" for line in lines]


def test_a_completed_batch_has_its_rows_in_order(cloud: Cloud) -> None:
    """Rows of all shards are in line order, and the report has their totals."""
    drop = cloud.drop(10).begin()
    for number in (2, 0, 1):
        drop.run_shard(number)
    drop.move(Status.FINALIZING, outcome="completed")
    assert drop.finish() == 1
    assert drop.ids("output") == ids(1, 2, 3, 5, 6, 7, 9, 10)
    assert drop.ids("error") == ids(4, 8)
    batch, report = drop.batch, drop.report()
    assert (batch.status, batch.announced) == (Status.COMPLETED, Status.COMPLETED)
    assert (drop.progress.completed, drop.progress.failed) == (8, 2)
    assert drop.progress.rows_per_second == 0
    assert report["status"] == "completed"
    assert report["completed_at"] == batch.completed_at
    assert report["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
    assert report["usage"]["total_tokens"] == 10 * 10 + 8 * 3
    assert report["tidemill"]["gpu_seconds"] == 4.5
    assert report["tidemill"]["model_revision"] == "revision"
    OpenAIBatch.model_validate(report)
    for name in ("output", "error"):
        file = cloud.run(cloud.deployment.files.get_file(report[f"{name}_file_id"]))
        assert file.key == getattr(batch.outputs, f"{name}_key")
        found = cloud.run(cloud.deployment.bucket.head(file.key))
        assert found is not None
        assert file.version_id == found["VersionId"]
        assert file.num_bytes == len(cloud.read(file.key) or b"")
        assert (file.tenant, file.purpose) == ("owner", "batch_output")
        assert file.expires == batch.expires is not None
    assert cloud.run(active_ids(cloud.deployment.table)) == []
    head = cloud.run(cloud.deployment.bucket.head(batch.outputs.output_key))
    assert head["ContentType"] == "application/x-ndjson"


@pytest.mark.parametrize("seconds", [3600, 400 * 86_400])
def test_result_files_may_be_forgotten_before_their_batch(cloud: Cloud, seconds: int) -> None:
    """They expire after their own time, never after the batch that names them; S3 deletes them."""
    drop = cloud.drop(4, options=Options(output_expires_seconds=seconds)).begin()
    drop.run_shard(0)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    batch = drop.batch
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = cloud.run(cloud.deployment.files.get_file(file_id))
        assert file.expires == min(file.created_at + seconds, batch.expires)
        tagged = cloud.aws.clients["s3"].get_object_tagging(
            Bucket=cloud.deployment.bucket.name, Key=file.key
        )
        if cloud.emulator.name != "ministack":  # it forgets the tags of what comes in parts
            assert [tag["Key"] for tag in tagged["TagSet"]] == [SHORT_LIVED.partition("=")[0]]


def test_the_report_has_a_price_if_a_rate_is_set(ministack: Any) -> None:
    """The report's price is the GPU time at the model's rate."""
    cloud = Cloud.on(ministack, gpu_hour_prices='{"tidemill-demo": 3.6}')
    drop = cloud.drop(4).begin()
    drop.run_shard(0, gpu_seconds=1000)
    drop.move(Status.FINALIZING, outcome="completed").finish()
    assert drop.report()["tidemill"]["cost"] == 1.0


def test_a_batch_whose_rows_all_failed_is_completed(mini: Cloud) -> None:
    """Without a success there is no output object, its id is null, and the batch is completed."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0)
    drop.put_rows(shard, [4])
    mini.run(mini.deployment.table.abandon(drop.id, 0, "it was lost"))
    drop.move(Status.FINALIZING, outcome="completed").finish()
    assert (drop.ids("output"), drop.ids("error")) == (None, ids(1, 2, 3, 4))
    assert drop.batch.status is Status.COMPLETED
    assert (drop.report()["output_file_id"], drop.progress.failed) == (None, 4)


@pytest.mark.parametrize("num_done", [0, 3, 5])
def test_a_cancelled_batch_keeps_what_is_finished(cloud: Cloud, num_done: int) -> None:
    """Durable rows exist at 0 %, in the middle and at 99 %; other lines have none."""
    drop = cloud.drop(20).begin()
    for number in range(min(num_done, 4)):
        drop.run_shard(number)
    lines = list(range(1, 4 * min(num_done, 4) + 1))
    if num_done:
        shard = drop.claim(4)
        drop.put_rows(shard, [17, 18] if num_done < 5 else [17, 18, 20])
        lines += [17, 18] if num_done < 5 else [17, 18, 20]
    drop.move(Status.CANCELLING).finish()
    assert drop.ids("output") == (ids(*(n for n in lines if n % 4)) or None)
    assert drop.ids("error") == (ids(*(n for n in lines if n % 4 == 0)) or None)
    report = drop.report()
    assert report["status"] == "cancelled"
    assert report["request_counts"]["total"] == 20
    assert drop.progress.num_rows == len(lines)
    untouched = drop.shard(3)
    assert (untouched.fence, untouched.status) == ((1, "done") if num_done > 3 else (0, "pending"))


@pytest.mark.parametrize("num_done", [0, 2, 4])
def test_an_expired_batch_has_a_row_for_every_line(cloud: Cloud, num_done: int) -> None:
    """Finished rows stay, and each line that was not run has a row that says why."""
    drop = cloud.drop(20).begin()
    for number in range(num_done):
        drop.run_shard(number)
    drop.put_rows(drop.claim(4), [18, 20])
    drop.move(Status.FINALIZING, outcome="expired").finish()
    done = [*range(1, 4 * num_done + 1), 18, 20]
    assert drop.ids("output") == ids(*(n for n in done if n % 4))
    assert drop.ids("error") == ids(*(n for n in range(1, 21) if n not in done or n % 4 == 0))
    rows = drop.result("error") or []
    expired = [row for row in rows if row.get("error")]
    assert [row["custom_id"] for row in expired] == ids(*(n for n in range(1, 21) if n not in done))
    assert all(row["response"] is None for row in expired)
    assert expired[0]["error"] == {"code": "batch_expired", "message": EXPIRED_MESSAGE}
    counts = drop.report()["request_counts"]
    assert counts == {
        "total": 20,
        "completed": sum(n % 4 != 0 for n in done),
        "failed": sum(n % 4 == 0 for n in done),
    }
    assert drop.batch.status is Status.EXPIRED


def test_a_batch_whose_input_changed_fails_with_its_finished_rows(mini: Cloud) -> None:
    """A batch that fails on its way publishes what was finished, and lines not run have no row."""
    drop = mini.drop(8).begin()
    drop.run_shard(0)
    error = {"code": "input_changed", "message": "The input has changed."}
    drop.move(Status.FINALIZING, outcome="failed", errors=[error]).finish()
    assert (drop.ids("output"), drop.ids("error")) == (ids(1, 2, 3), ids(4))
    assert drop.report()["status"] == "failed"
    assert [found["code"] for found in drop.report()["errors"]["data"]] == ["input_changed"]


def test_a_repeated_message_changes_nothing(mini: Cloud) -> None:
    """Finalize of a batch that has ended writes nothing again."""
    drop = mini.drop(4).begin()
    drop.run_shard(0)
    drop.move(Status.FINALIZING, outcome="completed")
    before = drop.batch
    drop.finish()
    ended = drop.batch
    finalize(mini.aws, mini.deployment, before, plenty)
    assert drop.batch.ended_at == ended.ended_at
    assert drop.batch.status is Status.COMPLETED
    for key in (ended.outputs.output_key, ended.outputs.report_key):
        assert mini.versions(key) == 1
    assert mini.messages() == []


@pytest.mark.parametrize(
    ("status", "stride"),
    with_long([(Status.FINALIZING, 7)], [(Status.FINALIZING, 1), (Status.CANCELLING, 1)]),
)
def test_a_run_may_die_at_any_moment(mini: Cloud, status: Status, stride: int) -> None:
    """Killed between any two of its requests, another run ends in the very same state."""
    outcome = {"outcome": "expired"} if status is Status.FINALIZING else {}
    results: list[Any] = []
    was_killed = True
    while was_killed:
        drop = mini.drop(8, key=f"input/{len(results)}.jsonl").begin()
        drop.run_shard(0)
        drop.put_rows(drop.claim(1), [6])
        drop.move(status, ago_seconds=60, **outcome)
        run = partial(finalize, mini.aws, mini.deployment, drop.batch, plenty)
        was_killed = is_killed_after(stride * len(results), mini.aws, run)
        # The turn of the dead lapses.
        mini.run(mini.deployment.table.change_batch(drop.id, drop.batch.status, turn_until=0))
        finalize(mini.aws, mini.deployment, drop.batch, plenty)
        assert mini.versions(drop.batch.outputs.output_key) == 1
        report = drop.report()
        assert report["status"] == drop.batch.status
        results.append(
            (drop.batch.status, drop.result("output"), drop.result("error"), report["usage"])
        )
    assert stride * len(results) > 20
    assert all(result == results[-1] for result in results)


def test_two_runs_at_once_do_the_work_once(mini: Cloud) -> None:
    """One of many concurrent messages finalizes, and nothing is written twice."""
    drop = mini.drop(8).begin()
    drop.put_rows(drop.claim(0), [1, 2])
    drop.move(Status.FINALIZING, outcome="expired", ago_seconds=60)
    batch = drop.batch
    threads = [
        threading.Thread(target=finalize, args=(mini.aws, mini.deployment, batch, plenty))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drop.batch.status is Status.EXPIRED
    assert (drop.shard(0).fence, drop.shard(1).fence) == (2, 1)
    assert mini.versions(drop.batch.outputs.error_key) == 1
    assert mini.messages() == []


def test_a_run_without_time_rings_for_another(mini: Cloud) -> None:
    """Too little time left means one message and no work; the next run goes on."""
    drop = mini.drop(4).begin()
    drop.claim(0)
    drop.move(Status.FINALIZING, outcome="expired")
    assert drop.finalize(lambda: 5.0) == [{"kind": "advance", "batch_id": drop.id}]
    assert drop.shard(0).fence == 1
    assert drop.finish() == 1


def test_a_run_that_fails_leaves_the_turn_to_the_next(mini: Cloud) -> None:
    """An error of AWS is the caller's to see, and does not hold the next run off."""
    drop = mini.drop(4).begin()
    drop.run_shard(0)
    drop.move(Status.FINALIZING, outcome="completed")
    segment = mini.run(mini.deployment.bucket.list_keys(f"work/{drop.id}/0000000/output"))[0]
    data = mini.read(segment)
    mini.run(mini.deployment.bucket.delete(segment))
    with pytest.raises(AwsError):
        finalize(mini.aws, mini.deployment, drop.batch, plenty)
    mini.run(mini.deployment.bucket.put(segment, data or b""))
    assert drop.finish() == 1
    assert drop.ids("output") == ids(1, 2, 3)


def test_a_file_that_failed_its_check_has_a_report(mini: Cloud) -> None:
    """Intake ends an invalid file with a report of the reason, once, however often it runs."""
    drop = mini.drop(4)
    errors = (BatchError("invalid_json_line", "not JSON", line=3),)
    for now in (1000, 2000):
        ended = end_batch(
            mini.aws, mini.deployment, drop.id, Status.FAILED, now, errors=errors, num_errors=1
        )
        assert ended is not None
        assert ended.failed_at == 1000
    assert drop.batch.errors == errors
    report = drop.report()
    assert (report["status"], report["failed_at"]) == ("failed", 1000)
    assert report["errors"]["data"] == [
        {"code": "invalid_json_line", "message": "not JSON", "param": None, "line": 3}
    ]
    assert mini.versions(drop.batch.outputs.report_key) == 1


def test_a_batch_that_was_cancelled_meanwhile_does_not_fail(mini: Cloud) -> None:
    """The first move wins: an end that no longer follows leaves batch and report as they are."""
    drop = mini.drop(4).move(Status.CANCELLING)
    found = end_batch(mini.aws, mini.deployment, drop.id, Status.FAILED, 1000)
    assert found is not None
    assert found.status is Status.CANCELLING
    assert drop.report() is None
    drop.finish()
    assert drop.report()["status"] == "cancelled"


def test_an_unknown_batch_has_no_end(mini: Cloud) -> None:
    """There is nothing to end and nothing is written."""
    assert end_batch(mini.aws, mini.deployment, "batch_x", Status.FAILED, 1) is None
    assert mini.run(mini.deployment.table.get_batch("batch_x")) is None


def test_an_older_upload_publishes_first_and_leaves_the_report_alone(mini: Cloud) -> None:
    """A newer batch of a key waits for the older one, whose report never covers its own."""
    older = mini.drop(4).begin()
    older.run_shard(0)
    newer = mini.drop(8).begin()
    for number in (0, 1):
        newer.run_shard(number)
    newer.move(Status.FINALIZING, outcome="completed")
    assert newer.finalize() == [{"kind": "advance", "batch_id": newer.id}]
    assert newer.result("output") is None
    older.move(Status.CANCELLING).finish()
    assert older.ids("output") == ids(1, 2, 3)
    assert older.report() is None
    newer.finish()
    assert newer.ids("output") == ids(1, 2, 3, 5, 6, 7)
    assert newer.report()["id"] == newer.id


def test_errors_of_an_older_upload_do_not_accompany_a_newer_output(mini: Cloud) -> None:
    """A result without rows deletes the older object of its key; the versions stay."""
    older = mini.drop(4).begin()
    older.run_shard(0)
    older.move(Status.FINALIZING, outcome="completed").finish()
    assert older.ids("error") == ids(4)
    newer = mini.drop(3).begin()
    newer.run_shard(0)
    newer.move(Status.FINALIZING, outcome="completed").finish()
    assert (newer.ids("output"), newer.ids("error")) == (ids(1, 2, 3), None)
    assert mini.versions(older.batch.outputs.error_key) == 1


def test_newer_errors_are_not_deleted_as_stale(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may write them between the listing and the deletion."""
    older = mini.drop(4).begin()
    older.run_shard(0)
    older.move(Status.FINALIZING, outcome="completed").finish()
    error_key = older.batch.outputs.error_key
    renew = BatchLock.renew

    def renew_slowly(lock: BatchLock) -> Batch:
        mini.run(mini.deployment.bucket.put(error_key, b"newer"))
        return renew(lock)

    newer = mini.drop(3).begin()
    newer.run_shard(0)
    monkeypatch.setattr(BatchLock, "renew", renew_slowly)
    newer.move(Status.FINALIZING, outcome="completed").finish()
    assert mini.run(mini.deployment.bucket.get(error_key)) == b"newer"


def test_a_batch_without_any_row_leaves_older_results_alone(mini: Cloud) -> None:
    """An upload that was cancelled before it began does not take the last good output away."""
    older = mini.drop(4).begin()
    older.run_shard(0)
    older.move(Status.FINALIZING, outcome="completed").finish()
    newer = mini.drop(4).move(Status.CANCELLING)
    newer.finish()
    assert newer.batch.output_file_id is None
    assert older.ids("output") == ids(1, 2, 3)
    assert newer.report()["id"] == newer.id
