"""From an object to shards, in one run or in many."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.aws.queues import advance_message
from handler.batch.keys import work_prefix
from handler.batch.model import Batch, BatchError, Shard
from handler.batch.states import Status
from handler.errors import AwsError
from handler.intake.checkpoint import load_checkpoint
from handler.moves.cancel import cancel
from handler.moves.turn import Run
from tests.emulators import MODEL, Emulator, active_ids
from tests.handler.intake.rig import Cloud, line_of, lines_of, time_for


@pytest.fixture(scope="module")
def shared(ministack: Emulator) -> Cloud:
    """Return a deployment with tiny shards for many files."""
    return Cloud.on(ministack, shard_lines="3", shard_bytes="500")


def cut_of(shards: list[Shard]) -> list[tuple[int, int, int, int, int]]:
    """Return what was planned, whatever the batch is called."""
    return [
        (shard.number, shard.first_line, shard.num_rows, shard.start, shard.end) for shard in shards
    ]


def test_a_good_file_is_cut_into_shards_that_can_be_run(cloud: Cloud) -> None:
    """Shards cover the file without a gap; model, endpoint and counts stand in the batch."""
    data = lines_of(24) + b"\n" + line_of("last", url="/v1/completions")
    batch = cloud.take_in(cloud.create(data))
    assert batch.status is Status.IN_PROGRESS
    assert (batch.model, batch.endpoint) == (MODEL, "/v1/chat/completions")
    assert (batch.num_rows, batch.num_shards, batch.shards_left) == (25, 3, 3)
    assert batch.shards_rung == 0
    assert batch.checkpoint is None
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
    """The report beside where its output would be says the same."""
    data = lines_of(12) + b"{\n" + line_of(3) + b"\n" + line_of("z", body={"model": "no"})
    batch = cloud.take_in(cloud.create(data))
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


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"", "empty_file", "no lines"),
        (b"\n \r\n\t\n", "empty_file", "no lines"),
        (b"\xef\xbb\xbf", "empty_file", "no lines"),
        (gzip.compress(b""), "empty_file", "no lines"),
        (b"[ ]", "empty_file", "no lines"),
        (gzip.compress(lines_of(3))[:-9], "invalid_json_line", "cut off after"),
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
    """Whatever was asked for about invalid lines: there is no other."""
    batch = mini.take_in(mini.create(data, metadata={"on-invalid-line": choice}))
    assert batch.status is Status.FAILED
    [error] = batch.errors
    assert error.code == code
    assert word in error.message
    assert batch.num_errors >= 1


def test_a_file_may_begin_with_a_byte_order_mark(mini: Cloud) -> None:
    """As Windows programs write it."""
    batch = mini.take_in(mini.create(b"\xef\xbb\xbf" + lines_of(2)))
    assert batch.status is Status.IN_PROGRESS
    assert mini.shards(batch.id)[0].start == 0


def test_invalid_lines_can_be_skipped(mini: Cloud) -> None:
    """They are rows like others, and their errors are told there."""
    data = b"[1]\n" + lines_of(3) + b"{\n" + line_of("s", body={"model": "no"})
    batch = mini.take_in(mini.create(data, metadata={"on-invalid-line": "skip"}))
    assert batch.status is Status.IN_PROGRESS
    assert (batch.num_rows, batch.num_errors, batch.errors) == (6, 0, ())
    assert sum(shard.num_rows for shard in mini.shards(batch.id)) == 6


def test_repeated_ids_fail_a_file_all_the_same(mini: Cloud) -> None:
    """Its rows could not be told apart."""
    data = b"[1]\n" + lines_of(3) + line_of(1)
    batch = mini.take_in(mini.create(data, metadata={"on-invalid-line": "skip"}))
    assert batch.status is Status.FAILED
    assert [(error.code, error.line) for error in batch.errors] == [("duplicate_custom_id", 5)]


def test_an_option_that_cannot_be_fails_the_batch(mini: Cloud) -> None:
    """The file is not even read."""
    batch = mini.create(lines_of(1), metadata={"completion-window": "1 week"})
    mini.aws.clients["s3"].delete_object(
        Bucket=mini.bucket, Key=batch.source.key, VersionId=batch.source.version_id
    )
    batch = mini.take_in(batch)
    assert batch.status is Status.FAILED
    [error] = batch.errors
    assert (error.code, error.param) == ("invalid_option", "completion-window")


ends = st.sampled_from([b"", b"\n"])
lines = st.one_of(
    st.integers(0, 30).map(line_of),
    st.integers(0, 30).map(line_of),
    st.integers(0, 30).map(line_of),
    st.just(b""),
    st.just(b" \r"),
    st.sampled_from([b"{", b"[]", line_of("u", url="/nowhere"), line_of("m", body={"model": 1})]),
    st.integers(1, 3).map(lambda size: line_of("long" + "x" * 400 * size)),
)


@given(
    st.builds(lambda some, end: b"\n".join(some) + end, st.lists(lines, max_size=20), ends),
    st.lists(st.integers(0, 12), min_size=1, max_size=12),
    st.integers(1, 400),
    st.sampled_from(["fail", "skip"]),
)
def test_many_runs_find_what_one_finds(
    shared: Cloud,
    data: bytes,
    looks: list[int],
    chunk_bytes: int,
    choice: str,
) -> None:
    """Wherever the runs stop: the same shards, errors and counts, and never an endless loop."""
    metadata = {"on-invalid-line": choice}
    expected = shared.take_in(shared.create(data, f"input/{uuid4()}.jsonl", metadata))
    batch = shared.create(data, f"input/{uuid4()}.jsonl", metadata)
    for _ in range(100):
        num_looks = looks.pop() if looks else 1
        batch = shared.take_in(batch, time_for(num_looks), chunk_bytes=chunk_bytes)
        if batch.status is not Status.VALIDATING:
            break
    assert batch.status is expected.status
    same = ("errors", "num_errors", "num_rows", "num_shards", "shards_left", "model", "endpoint")
    assert [getattr(batch, name) for name in same] == [getattr(expected, name) for name in same]
    if batch.status is Status.IN_PROGRESS:
        assert cut_of(shared.shards(batch.id)) == cut_of(shared.shards(expected.id))
        num_rows = sum(bool(line.strip()) for line in data.split(b"\n"))
        assert batch.num_rows == num_rows
        assert sum(shard.num_rows for shard in shared.shards(batch.id)) == num_rows


def test_a_run_without_time_gets_a_line_further_and_rings_for_the_next(cloud: Cloud) -> None:
    """Ids that repeat in another run are found, and each run tells how far it came."""
    data = lines_of(5) + line_of(0)
    batch = cloud.create(data)
    offsets = []
    for _ in range(20):
        batch = cloud.take_in(batch, time_for(0), chunk_bytes=100)
        if batch.checkpoint is None:
            break
        offsets.append(load_checkpoint(batch.checkpoint).offset)
        assert cloud.messages() == [advance_message(batch.id)]
    assert len(offsets) >= 5
    assert offsets == sorted(set(offsets))
    assert offsets[-1] == len(data)
    assert batch.errors == (
        BatchError("duplicate_custom_id", "`custom_id` is that of line 1 too", "custom_id", 6),
    )
    saved = cloud.run(cloud.deployment.bucket.list_keys(work_prefix(batch.id)))
    assert len(saved) == len(offsets)


def test_the_search_for_repeated_ids_goes_on_in_the_next_run(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Share by share, however little time a run has: no file is too long for it."""
    monkeypatch.setattr("engine.batchfile.duplicates._MAX_SHARE_IDS", 10)
    data = lines_of(40) + line_of(7) + b"\n" + line_of(3)
    batch, places = mini.create(data), []
    for _ in range(50):
        batch = mini.take_in(batch, time_for(0), chunk_bytes=2000)
        if batch.checkpoint is None:
            break
        checkpoint = load_checkpoint(batch.checkpoint)
        places.append((checkpoint.offset, checkpoint.search.num_done))
    assert places == sorted(set(places))
    assert [place for place in places if place[0] == len(data)] == [
        (len(data), num_done) for num_done in range(8)
    ]
    assert [(error.line, error.message) for error in batch.errors] == [
        (41, "`custom_id` is that of line 8 too"),
        (42, "`custom_id` is that of line 4 too"),
    ]


def test_a_long_search_keeps_its_turn_and_hears_of_a_cancel(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at the batch every few seconds, as reading does."""
    batch = mini.take_in(mini.create(lines_of(40)), time_for(1), chunk_bytes=2000)
    while load_checkpoint(batch.checkpoint or "").offset < batch.source.num_bytes:
        batch = mini.take_in(batch, time_for(0), chunk_bytes=2000)
    monkeypatch.setattr("engine.batchfile.duplicates._MAX_SHARE_IDS", 10)
    clock, looks = count(time.time(), 1.0), 0
    keep_turn = Run.keep_turn

    def keep_turn_and_cancel(run: Run) -> Batch:
        nonlocal looks
        looks += 1
        if looks == 3:
            mini.run(cancel(mini.deployment, batch.id, int(time.time())))
        return keep_turn(run)

    monkeypatch.setattr(Run, "keep_turn", keep_turn_and_cancel)
    assert mini.take_in(batch, now=lambda: next(clock)).status is Status.CANCELLED
    assert looks == 3


def test_a_run_that_comes_further_has_failed_no_more(mini: Cloud) -> None:
    """What is counted is the time for which no run has: an outage in the middle is forgotten."""
    batch = mini.create(lines_of(40))
    mini.run(mini.deployment.table.set_once(batch.id, "failing_since", 1))
    assert mini.take_in(batch, time_for(1), chunk_bytes=2000).failing_since is None


def test_a_cut_that_has_begun_goes_on_with_its_limits(mini: Cloud) -> None:
    """A new version of the deployment may cut other files otherwise, not this one."""
    batch = mini.take_in(mini.create(lines_of(40)), time_for(1), chunk_bytes=2000)
    assert batch.status is Status.VALIDATING
    batch = mini.having(shard_lines=7).take_in(batch)
    assert [shard.num_rows for shard in mini.shards(batch.id)] == [10, 10, 10, 10]


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
        mini.take_in(batch)
    assert mini.batch(batch.id).status is Status.VALIDATING
    batch = mini.take_in(batch)
    assert batch.status is Status.IN_PROGRESS
    assert [shard.num_rows for shard in mini.shards(batch.id)] == [10, 10, 10, 10, 5]


def test_a_checkpoint_waits_for_the_shards_before_it(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly they are recorded: the next run will not cut them again."""
    put = mini.aws.clients["dynamodb"].put_item

    def put_slowly(**arguments: object) -> object:
        time.sleep(0.05)
        return put(**arguments)

    monkeypatch.setattr(mini.aws.clients["dynamodb"], "put_item", put_slowly)
    batch = mini.create(lines_of(200))
    batch = mini.take_in(batch, time_for(4), chunk_bytes=5000)
    assert batch.checkpoint is not None
    num_cut = load_checkpoint(batch.checkpoint).cutter.number
    assert num_cut > 8
    assert [shard.number for shard in mini.shards(batch.id)] == list(range(num_cut))


def test_one_run_at_a_time(mini: Cloud) -> None:
    """A second one leaves the file alone, and rings for later should the first have died."""
    batch = mini.create(lines_of(3))
    now = time.time()
    turn = mini.deployment.table.take_turn(batch.id, "other", now=now, until=now + 20)
    assert mini.run(turn)
    assert mini.take_in(batch).status is Status.VALIDATING
    assert mini.run(mini.deployment.control.count()) >= 1
    assert mini.take_in(batch, now=lambda: now + 21).status is Status.IN_PROGRESS


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
    mini.take_in(batch, now=now, chunk_bytes=100)
    assert mini.batch(batch.id).status is Status.CANCELLED
    assert advance_message(batch.id) in mini.messages()
    assert len(mini.shards(batch.id)) < 10


def test_a_window_may_end_while_a_file_is_read(mini: Cloud) -> None:
    """The run stops and rings, so that the batch expires."""
    batch = mini.create(lines_of(1000), metadata={"completion-window": "30m"})
    batch = mini.take_in(batch, now=clock_that(-1, lambda: None), chunk_bytes=100)
    assert batch.status is Status.VALIDATING
    assert mini.messages() == [advance_message(batch.id)]
    assert len(mini.shards(batch.id)) < 100


def test_a_batch_that_is_no_longer_validating_is_left_alone(mini: Cloud) -> None:
    """A message that comes late changes nothing."""
    batch = mini.create(lines_of(3))
    done = mini.take_in(batch)
    assert replace(mini.take_in(batch), turn_until=0) == replace(done, turn_until=0)


def remove(cloud: Cloud, batch: Batch) -> None:
    """Delete the very version that was pinned."""
    cloud.aws.clients["s3"].delete_object(
        Bucket=cloud.bucket, Key=batch.source.key, VersionId=batch.source.version_id
    )


def test_an_input_that_is_gone_fails_the_batch(cloud: Cloud) -> None:
    """Deleted before the first run, or between two."""
    batch = cloud.create(lines_of(3))
    remove(cloud, batch)
    assert [error.code for error in cloud.take_in(batch).errors] == ["input_gone"]
    batch = cloud.take_in(cloud.create(lines_of(30)), time_for(0), chunk_bytes=100)
    assert batch.status is Status.VALIDATING
    remove(cloud, batch)
    batch = cloud.take_in(batch)
    assert batch.status is Status.FAILED
    assert [error.code for error in batch.errors] == ["input_gone"]


def test_an_input_that_was_changed_fails_the_batch(cloud: Cloud) -> None:
    """Where the bucket keeps no versions there is only what was written last."""
    batch = cloud.create(lines_of(3))
    source = replace(batch.source, version_id=None)
    other = replace(batch, id="batch_without_version", source=source)
    cloud.run(cloud.deployment.table.create_batch(other))
    cloud.put(lines_of(4))
    assert cloud.take_in(batch).status is Status.IN_PROGRESS
    other = cloud.take_in(other)
    assert other.status is Status.FAILED
    assert [error.code for error in other.errors] == ["input_changed"]


def test_a_line_without_an_end_is_given_up(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run could come past it, so the file is refused with the number of the line."""
    monkeypatch.setattr("engine.batchfile.lines.MAX_SKIPPED_BYTES", 500)
    data = lines_of(2) + b'{"custom_id": "' + b"x" * 2000
    batch = mini.create(data)
    for _ in range(4):
        batch = mini.take_in(batch, time_for(0), chunk_bytes=100)
    [error] = batch.errors
    assert "Line 3 is longer" in error.message


def test_an_endpoint_is_strict_only_where_a_request_named_one(mini: Cloud) -> None:
    """With the setting, lines of an API batch must be for it; an upload names none."""
    strict = mini.having(strict_endpoint=True)
    drop = strict.create(lines_of(1) + line_of("t", url="/v1/completions"))
    assert strict.take_in(drop).status is Status.IN_PROGRESS
    outputs = replace(drop.outputs, output_key="files/a.jsonl")
    for cloud, status in ((strict, Status.FAILED), (mini, Status.IN_PROGRESS)):
        batch = replace(drop, id=f"batch_{status}", outputs=outputs, endpoint="/v1/completions")
        cloud.run(cloud.deployment.table.create_batch(batch))
        done = cloud.take_in(batch)
        assert done.status is status
        assert done.endpoint == "/v1/completions"
        assert all(error.code == "url_mismatch" for error in done.errors)


def test_a_service_that_fails_is_no_verdict_on_the_file(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with the error, so that the message comes again, and its turn is free."""
    batch = mini.create(lines_of(3))

    def refuse(**_: object) -> object:
        raise AwsError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(mini.aws.clients["s3"], "get_object", refuse)
        with pytest.raises(AwsError):
            mini.take_in(batch)
    assert mini.take_in(batch).status is Status.IN_PROGRESS
