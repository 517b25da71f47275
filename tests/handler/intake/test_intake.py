"""Intake from an object to shards, in one run or in many."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.emulators import MODEL, active_ids
from tests.handler.intake.rig import Cloud, line_of, lines_of
from tidemill.batch.file.unknown_parameters import UnknownParameter
from tidemill.batch.model import Batch
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import intake_message
from tidemill.handler.errors import AwsError
from tidemill.handler.intake.new_batch import create_batch_of_drop
from tidemill.handler.lifecycle.cancel import cancel


def test_a_good_file_is_cut_into_shards_that_can_be_run(cloud: Cloud) -> None:
    """Shards cover the file without a gap; model, endpoint and counts stand in the batch."""
    data = lines_of(24) + b"\n" + line_of("last", url="/v1/completions")
    batch = cloud.ingest(cloud.create(data))
    assert batch.status is Status.IN_PROGRESS
    assert (batch.model, batch.endpoint) == (MODEL, "/v1/chat/completions")
    assert (batch.num_rows, batch.num_shards, batch.shards_left) == (25, 3, 3)
    assert batch.shards_rung == 0
    assert batch.errors == ()
    assert batch.announced is Status.IN_PROGRESS
    shards = cloud.shards(batch.id)
    assert [shard.num_rows for shard in shards] == [10, 10, 5]
    assert [shard.first_line for shard in shards] == [1, 11, 21]
    assert [shard.start for shard in shards] == [0, *(shard.end for shard in shards[:-1])]
    assert shards[-1].end == len(data)
    for shard in shards:
        ids = [line_of(n) for n in range(shard.first_line - 1, shard.first_line + 8)]
        assert data[shard.start : shard.end].startswith(b"\n".join(ids[:4]))


def test_a_bad_file_fails_with_every_bad_line_named(cloud: Cloud) -> None:
    """The report in the place of its output contains the same errors."""
    data = lines_of(12) + b"{\n" + line_of(3) + b"\n" + line_of("z", body={"model": "no"})
    batch = cloud.ingest(cloud.create(data))
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [
        ("invalid_json_line", 13),
        ("duplicate_custom_id", 14),
        ("model_not_found", 15),
    ]
    assert batch.num_errors == 3
    assert batch.announced is Status.FAILED
    report = cloud.run(cloud.deployment.bucket.get(batch.outputs.report_key))
    assert b'"duplicate_custom_id"' in report
    assert cloud.run(active_ids(cloud.deployment.table)) == []


def test_foreign_media_are_refused_before_a_worker_starts(mini: Cloud) -> None:
    """The objects are not read; with `skip` the worker prints the rows of such lines."""
    urls = [f"s3://{mini.bucket}/media/default/missing", f"s3://{mini.bucket}/media/other/a"]
    lines = [
        line_of(url, url="/v1/audio/transcriptions", body={"model": MODEL, "file_url": url})
        for url in urls
    ]
    batch = mini.ingest(mini.create(b"\n".join(lines)))
    (error,) = batch.errors
    assert (error.code, error.param, error.line) == ("fetch_failed", "body.file_url", 2)
    assert f"may only read s3://{mini.bucket}/media/default/ here" in error.message
    skipping = {"on-invalid-line": "skip"}
    skipped = mini.ingest(mini.create(b"\n".join(lines), "input/skip.jsonl", skipping))
    assert (skipped.status, skipped.num_rows) == (Status.IN_PROGRESS, 2)


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"", "empty_file", "no lines"),
        (b"\n \r\n\t\n", "empty_file", "no lines"),
        (b"\xef\xbb\xbf", "empty_file", "no lines"),
        (gzip.compress(b""), "empty_file", "no lines"),
        (b"[ ]", "empty_file", "no lines"),
        (gzip.compress(lines_of(3))[:-9], "invalid_json_line", "truncated after"),
        (gzip.compress(b"a,b\n1,2\n"), "invalid_json_line", "CSV"),
        (b"PK\x03\x04" + bytes(40), "invalid_json_line", "zip archive"),
        (lines_of(3).decode().encode("utf-16"), "invalid_json_line", "UTF-16"),
        (b"\0" * 2000, "invalid_json_line", "NUL"),
        (b"[" + line_of(1) + b",\n" + line_of(2), "invalid_json_line", "`]` is missing"),
        (b"custom_id,url\n1,2\n", "invalid_json_line", "CSV"),
        (b'{\n "custom_id": "a"\n}\n', "invalid_json_line", "over several lines"),
    ],
)
@pytest.mark.parametrize("choice", ["fail", "skip"])
def test_a_file_of_another_kind_gets_one_clear_message(
    mini: Cloud, data: bytes, code: str, word: str, choice: str
) -> None:
    """The option for invalid lines does not matter: there is one message."""
    batch = mini.ingest(mini.create(data, metadata={"on-invalid-line": choice}))
    assert batch.status is Status.FAILED
    [error] = batch.errors
    assert error.code == code
    assert word in error.message
    assert batch.num_errors >= 1


def test_a_file_may_begin_with_a_byte_order_mark(mini: Cloud) -> None:
    """Windows programs write one."""
    batch = mini.ingest(mini.create(b"\xef\xbb\xbf" + lines_of(2)))
    assert batch.status is Status.IN_PROGRESS
    assert mini.shards(batch.id)[0].start == 0


def test_invalid_lines_can_be_skipped(mini: Cloud) -> None:
    """They are rows like others, which contain their errors."""
    data = b"[1]\n" + lines_of(3) + b"{\n" + line_of("s", body={"model": "no"})
    batch = mini.ingest(mini.create(data, metadata={"on-invalid-line": "skip"}))
    assert batch.status is Status.IN_PROGRESS
    assert (batch.num_rows, batch.num_errors, batch.errors) == (6, 0, ())
    assert sum(shard.num_rows for shard in mini.shards(batch.id)) == 6


def test_repeated_ids_fail_a_file_all_the_same(mini: Cloud) -> None:
    """Its rows could not be distinguished."""
    data = b"[1]\n" + lines_of(3) + line_of(1)
    batch = mini.ingest(mini.create(data, metadata={"on-invalid-line": "skip"}))
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("duplicate_custom_id", 5)]


def test_unknown_parameters_are_counted_in_the_batch(mini: Cloud) -> None:
    """It runs; one that is strict fails, whatever invalid lines do."""
    body = {"model": MODEL, "messages": [], "temprature": 1}
    data = lines_of(1) + b"".join(line_of(name, body=body) + b"\n" for name in "ab")
    batch = mini.ingest(mini.create(data))
    url, found = "/v1/chat/completions", batch.unknown_parameters
    assert batch.status is Status.IN_PROGRESS
    assert found == (UnknownParameter("temprature", url, 2, 2, "temperature"),)
    options = {"strict-parameters": "true", "on-invalid-line": "skip"}
    batch = mini.ingest(mini.create(data, metadata=options))
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("unknown_parameter", 2)]


def test_an_option_that_cannot_be_fails_the_batch(mini: Cloud) -> None:
    """The file is not even read."""
    batch = mini.create(lines_of(1), metadata={"completion-window": "1 week"})
    mini.aws.clients["s3"].delete_object(
        Bucket=mini.bucket, Key=batch.source.key, VersionId=batch.source.version_id
    )
    batch = mini.ingest(batch)
    assert batch.status is Status.FAILED
    [error] = batch.errors
    assert (error.code, error.param) == ("invalid_option", "completion-window")


def test_a_run_that_dies_is_done_again(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that cannot be recorded fails the run; the next ends as if nothing had been."""
    batch = mini.create(lines_of(45))
    put = mini.aws.clients["dynamodb"].put_item
    calls = iter(range(100))

    def fail_at_third(**arguments: object) -> object:
        if next(calls) == 2:
            raise ConnectionError("lost")
        return put(**arguments)

    monkeypatch.setattr(mini.aws.clients["dynamodb"], "put_item", fail_at_third)
    with pytest.raises(ConnectionError):
        mini.ingest(batch)
    assert mini.batch(batch.id).status is Status.VALIDATING
    batch = mini.ingest(batch)
    assert batch.status is Status.IN_PROGRESS
    assert [shard.num_rows for shard in mini.shards(batch.id)] == [10, 10, 10, 10, 5]


def test_one_run_at_a_time(mini: Cloud) -> None:
    """A second one leaves the file alone, and rings for later should the first have died."""
    batch = mini.create(lines_of(3))
    now = time.time()
    turn = mini.deployment.table.acquire_lock(batch.id, "other", now=now, until=now + 20)
    assert mini.run(turn)
    assert mini.ingest(batch).status is Status.VALIDATING
    assert mini.run(mini.deployment.intake.count()) == 1
    assert mini.ingest(batch, now=lambda: now + 21).status is Status.IN_PROGRESS


def locked(cloud: Cloud, owner: str) -> Batch:
    """Return the batch of a new upload, created with a lock."""
    drop, now = cloud.put(lines_of(3)), int(time.time())
    batch = cloud.run(create_batch_of_drop(cloud.deployment, drop, now, owner))
    assert batch is not None
    return batch


def test_the_lock_of_a_creation_holds_for_its_run_alone(mini: Cloud) -> None:
    """Others wait until it has expired."""
    batch = locked(mini, "a")
    assert mini.ingest(batch, owner="b").turn == "a"
    assert mini.ingest(batch).status is Status.VALIDATING
    batch = mini.ingest(batch, owner="a")
    assert (batch.status, batch.turn) == (Status.IN_PROGRESS, None)


@pytest.mark.parametrize("seconds", [0, 10, 30])
def test_a_run_that_was_late_with_its_lock_acquires_it_again(mini: Cloud, seconds: int) -> None:
    """It fails only if another run has acquired it since."""
    batch, table = locked(mini, "a"), mini.deployment.table
    late = int(time.time()) + seconds
    if seconds > 20:
        stolen = table.acquire_lock(batch.id, "b", now=late, until=late + 20)
        assert mini.run(stolen).is_acquired
    done = mini.ingest(batch, now=lambda: late, owner="a")
    assert done.status is (Status.VALIDATING if seconds > 20 else Status.IN_PROGRESS)
    assert done.turn == ("b" if seconds > 20 else None)


def test_a_run_that_lost_its_lock_starts_nothing(mini: Cloud) -> None:
    """It notices when it moves the batch, and sends a message before it ends."""
    batch, table = locked(mini, "a"), mini.deployment.table
    start, calls = time.time(), iter(range(100_000))

    def now() -> float:
        if next(calls) == 1:
            acquired = table.acquire_lock(batch.id, "b", now=start + 30, until=start + 50)
            assert mini.run(acquired).is_acquired
        return start

    left = mini.ingest(batch, now=now, owner="a")
    assert (left.status, left.turn) == (Status.VALIDATING, "b")
    assert left.announced is Status.VALIDATING
    assert mini.messages(mini.deployment.intake) == [intake_message(batch.id)]
    done = mini.ingest(batch, now=lambda: start + 60)
    assert (done.status, done.turn) == (Status.IN_PROGRESS, None)


def clock_that(acts_at: int, act: Callable[[], object]) -> Callable[[], float]:
    """Return a clock that is ten seconds later at each look and once does something else."""
    calls = iter(range(100_000))
    start = time.time()

    def now() -> float:
        number = next(calls)
        if number == acts_at:
            act()
        return start + 10 * number

    return now


def test_a_cancelled_file_is_read_no_further(mini: Cloud) -> None:
    """The run stops within seconds, leaves the batch as it is, and rings for it."""
    batch = mini.create(lines_of(100))
    now = clock_that(12, lambda: mini.run(cancel(mini.deployment, batch.id, int(time.time()))))
    mini.ingest(batch, now=now, chunk_bytes=100)
    assert mini.batch(batch.id).status is Status.CANCELLED
    assert mini.shards(batch.id) == []


def test_a_window_may_end_while_a_file_is_read(mini: Cloud) -> None:
    """The run stops and rings, so that the batch expires."""
    batch = mini.create(lines_of(1000), metadata={"completion-window": "30m"})
    batch = mini.ingest(batch, now=clock_that(-1, lambda: None), chunk_bytes=100)
    assert batch.status is Status.VALIDATING
    assert mini.messages(mini.deployment.intake) == [intake_message(batch.id)]
    assert mini.shards(batch.id) == []


def test_a_batch_that_is_no_longer_validating_is_left_alone(mini: Cloud) -> None:
    """A message that comes late changes nothing."""
    batch = mini.create(lines_of(3))
    done = mini.ingest(batch)
    assert replace(mini.ingest(batch), turn_until=0) == replace(done, turn_until=0)


def remove(cloud: Cloud, batch: Batch) -> None:
    """Delete the very version that was pinned."""
    cloud.aws.clients["s3"].delete_object(
        Bucket=cloud.bucket, Key=batch.source.key, VersionId=batch.source.version_id
    )


def test_an_input_that_is_gone_fails_the_batch(cloud: Cloud) -> None:
    """Deleted before anybody read it."""
    batch = cloud.create(lines_of(3))
    remove(cloud, batch)
    batch = cloud.ingest(batch)
    assert batch.status is Status.FAILED
    assert [error.code for error in batch.errors] == ["input_gone"]


def test_an_input_that_was_changed_fails_the_batch(cloud: Cloud) -> None:
    """In an unversioned bucket only the last upload exists."""
    batch = cloud.create(lines_of(3))
    source = replace(batch.source, version_id=None)
    other = replace(batch, id="batch_without_version", source=source)
    cloud.run(cloud.deployment.table.create_batch(other))
    cloud.put(lines_of(4))
    assert cloud.ingest(batch).status is Status.IN_PROGRESS
    other = cloud.ingest(other)
    assert other.status is Status.FAILED
    assert [error.code for error in other.errors] == ["input_changed"]


def test_a_line_without_an_end_is_given_up(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run could come past it, so the file is refused with the number of the line."""
    monkeypatch.setattr("tidemill.batch.file.lines.MAX_SKIPPED_BYTES", 500)
    data = lines_of(2) + b'{"custom_id": "' + b"x" * 2000
    [error] = mini.ingest(mini.create(data), chunk_bytes=100).errors
    assert "Line 3 is longer" in error.message


def test_an_endpoint_is_strict_only_where_a_request_named_one(mini: Cloud) -> None:
    """If enabled, lines of an API batch must match its endpoint; an upload names none."""
    strict = mini.having(strict_endpoint=True)
    drop = strict.create(lines_of(1) + line_of("t", url="/v1/completions"))
    assert strict.ingest(drop).status is Status.IN_PROGRESS
    outputs = replace(drop.outputs, output_key="files/a.jsonl")
    for cloud, status in ((strict, Status.FAILED), (mini, Status.IN_PROGRESS)):
        batch = replace(drop, id=f"batch_{status}", outputs=outputs, endpoint="/v1/completions")
        cloud.run(cloud.deployment.table.create_batch(batch))
        done = cloud.ingest(batch)
        assert done.status is status
        assert done.endpoint == "/v1/completions"
        assert all(error.code == "url_mismatch" for error in done.errors)


def test_a_failing_service_does_not_fail_the_file(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with the error, so that the message comes again, and its turn is free."""
    batch = mini.create(lines_of(3))

    def refuse(**_: object) -> object:
        raise AwsError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(mini.aws.clients["s3"], "get_object", refuse)
        with pytest.raises(AwsError):
            mini.ingest(batch)
    assert mini.ingest(batch).status is Status.IN_PROGRESS
