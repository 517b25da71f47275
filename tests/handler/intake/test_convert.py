"""Files other than plain JSONL: converted once, then read like all others."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import pytest

from tests.handler.intake.rig import Cloud, line_of, lines_of, plenty, time_for
from tests.handler.killing import is_killed_after
from tests.long_parameters import with_long
from tidemill.batch.batch_request import parse_request
from tidemill.batch.model import Batch, Shard
from tidemill.batch.object_keys import converted_key
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.handler.aws.queues import intake_message
from tidemill.handler.control.advance import advance
from tidemill.handler.intake import convert
from tidemill.handler.intake.control_messages import IntakeStep
from tidemill.handler.intake.new_batch import create_batch
from tidemill.handler.intake.work_units import run_unit
from tidemill.handler.lifecycle.cancel import cancel

MIB = 2**20


@dataclass
class LongFile:
    """A file that takes many parts: its batch, its lines, the parts that were sent so far."""

    batch: Batch
    data: bytes
    sent: list[int] = field(default_factory=list)
    at_part: Callable[[], object] = lambda: None


def array_of(lines: bytes) -> bytes:
    """Return the same requests as one JSON array."""
    return b"[" + b",\n ".join(lines.splitlines()) + b"]\n"


def content_of(cloud: Cloud, key: str) -> bytes:
    """Return an object of the bucket."""
    return cloud.run(cloud.deployment.bucket.get(key))


def uploads_of(cloud: Cloud) -> list[Any]:
    """Return the multipart uploads that have not ended."""
    listed = cloud.aws.clients["s3"].list_multipart_uploads(Bucket=cloud.bucket)
    return list(listed.get("Uploads", ()))


def places_of(shards: list[Shard]) -> list[tuple[int, int, int, int]]:
    """Return the place of each shard in its file."""
    return [(shard.first_line, shard.num_rows, shard.start, shard.end) for shard in shards]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl.gz", gzip.compress(lines_of(25))),
        ("x.json", array_of(lines_of(25))),
        ("x.json.gz", gzip.compress(array_of(lines_of(25)))),
        ("X.JSONL", lines_of(25)),
        ("x.ndjson", lines_of(25)),
        ("x", lines_of(25)),
    ],
)
def test_every_form_of_a_file_becomes_the_same_shards(cloud: Cloud, name: str, data: bytes) -> None:
    """The name does not matter; results go next to it, and the batch names the dropped input."""
    plain = cloud.create(lines_of(25))
    cloud.ingest(plain)
    batch = cloud.ingest(cloud.create(data, f"input/{name}"))
    assert batch.status is Status.IN_PROGRESS
    assert (batch.num_rows, batch.num_shards) == (25, 3)
    assert places_of(cloud.shards(batch.id)) == places_of(cloud.shards(plain.id))
    assert content_of(cloud, batch.source.key) == lines_of(25)
    assert batch.source.num_bytes == len(lines_of(25))
    assert batch.input.key == f"input/{name}"
    assert batch.input_file_id == f"s3://{cloud.bucket}/input/{name}"
    assert batch.outputs.output_key == f"output/{name}.jsonl"
    assert uploads_of(cloud) == []


def test_a_file_of_the_api_may_have_any_form_too(mini: Cloud) -> None:
    """It goes the same way."""
    drop = mini.put(gzip.compress(array_of(lines_of(3))), "files/tenant/file-1")
    file = File("file-1", "tenant", drop.key, 10, 1, "lines.gz", "batch")
    mini.run(mini.deployment.files.put_file(file))
    request = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}
    batch = mini.run(create_batch(mini.deployment, "tenant", parse_request(request), 1_900_000_000))
    batch = mini.ingest(batch, now=lambda: 1_900_000_001)
    assert (batch.status, batch.num_rows) == (Status.IN_PROGRESS, 3)
    assert batch.source.key == converted_key(batch.id)
    assert batch.input.key == drop.key


def test_a_vendors_file_becomes_requests(mini: Cloud) -> None:
    """Without a recipe, rows of chats are requests, too."""
    body = {"model": "tidemill-demo", "messages": [{"role": "user", "content": "Hi"}]}
    chat = b'{"custom_id":"%s","method":"POST","url":"/v1/chat/completions","body":%s}\n'
    given = {
        "input/bedrock.jsonl": {"recordId": "a", "modelInput": body},
        "input/chats.jsonl": body,
        "input/no_url.jsonl": {"custom_id": "a", "body": body},
    }
    for key, line in given.items():
        batch = mini.ingest(mini.create(json.dumps(line).encode(), key))
        assert (batch.status, batch.num_rows) == (Status.IN_PROGRESS, 1), batch.errors
        custom_id = b"line-1" if line is body else b"a"
        printed = json.dumps(body, separators=(",", ":")).encode()
        assert content_of(mini, batch.source.key) == (chat % (custom_id, printed)).strip()


def test_bad_elements_are_named_by_their_number(mini: Cloud) -> None:
    """`line` counts elements, and so do the words."""
    data = b"[" + b",".join([line_of("a"), b'{\n "custom_id": 1}', b"{]", line_of("a")]) + b"]"
    batch = mini.ingest(mini.create(data))
    assert [(error.code, error.line) for error in batch.errors] == [
        ("missing_required_parameter", 2),
        ("invalid_json_line", 3),
        ("duplicate_custom_id", 4),
    ]
    assert batch.errors[-1].message == "`custom_id` is already used in element 1"


def test_a_damaged_file_leaves_nothing_behind(mini: Cloud) -> None:
    """No upload that S3 would keep, and be paid for."""
    batch = mini.ingest(mini.create(gzip.compress(lines_of(50))[:-1]))
    assert "truncated after" in batch.errors[0].message
    assert uploads_of(mini) == []
    assert not mini.has_object(converted_key(batch.id))


@pytest.fixture
def long_file(mini: Cloud, monkeypatch: pytest.MonkeyPatch) -> LongFile:
    """Return a file of five parts, and what is sent of it."""
    monkeypatch.setattr(convert, "PART_BYTES", 5 * MIB)
    noise = random.Random(1).randbytes(6 * MIB).hex()
    data = b"".join(line_of(number, noise=noise) + b"\n" for number in range(2))
    file = LongFile(mini.create(gzip.compress(data, 1), "input/x.jsonl.gz"), data)
    upload_part = type(mini.deployment.bucket).upload_part

    def counted(bucket: Any, key: str, upload_id: str, number: int, body: Any) -> Any:
        file.sent.append(number)
        file.at_part()
        return upload_part(bucket, key, upload_id, number, body)

    monkeypatch.setattr(type(mini.deployment.bucket), "upload_part", counted)
    return file


def test_a_long_file_is_made_plain_in_many_runs(mini: Cloud, long_file: LongFile) -> None:
    """The next run does not send again the parts that one run has sent."""
    # A look at the clock when it begins, and one before each part.
    batch = mini.ingest(long_file.batch, time_for(3))
    assert (batch.status, long_file.sent) == (Status.VALIDATING, [1, 2])
    assert mini.ingest(batch).status is Status.IN_PROGRESS
    assert sorted(long_file.sent) == [1, 2, 3, 4, 5]
    assert mini.run(mini.deployment.bucket.get(converted_key(batch.id))) == long_file.data


def test_a_file_that_no_run_can_come_further_with_is_refused(
    mini: Cloud, long_file: LongFile
) -> None:
    """Tries are limited, except runs that had no time or were slow; the error gives advice."""
    batch = mini.ingest(long_file.batch, time_for(3))
    in_vain = 0
    for num_looks in (3, 0, 2, 4, 3, 3, 0):
        batch = mini.ingest(batch, time_for(num_looks))
        assert batch.status is Status.VALIDATING
        assert batch.conversion is not None
        in_vain = batch.conversion.num_vain
    assert (in_vain, long_file.sent) == (2, [1, 2, 3])
    batch = mini.ingest(batch, time_for(1))
    assert batch.status is Status.FAILED
    assert batch.errors[0].message.startswith("The file is too large to be decompressed here:")
    assert uploads_of(mini) == []


def test_a_run_without_the_turn_refuses_nothing(
    mini: Cloud, long_file: LongFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was held up does not decide: another one continues."""
    monkeypatch.setattr(convert, "_MAX_VAIN", 1)
    batch = mini.ingest(long_file.batch, time_for(3))
    table, seconds = mini.deployment.table, iter([600.0])

    def held_up() -> float:
        left = next(seconds, 0.0)
        if not left:
            now = time.time() + 60
            assert mini.run(table.acquire_lock(batch.id, "other", now=now, until=now)).is_acquired
        return left

    assert mini.ingest(batch, held_up).status is Status.VALIDATING
    assert len(uploads_of(mini)) == 1


def test_parts_that_were_sent_end_a_time_of_failures(mini: Cloud, long_file: LongFile) -> None:
    """A file fails only after hours without progress."""
    table = mini.deployment.table
    mini.run(table.set_once(long_file.batch.id, "failing_since", 1))
    batch = mini.ingest(long_file.batch, time_for(1))
    assert (batch.failing_since, long_file.sent) == (1, [])
    batch = mini.ingest(batch, time_for(3))
    assert (batch.failing_since, batch.original) == (None, None)
    mini.run(table.set_once(batch.id, "failing_since", 1))
    assert mini.ingest(batch).failing_since is None


def test_a_cancelled_file_is_made_plain_no_further(mini: Cloud, long_file: LongFile) -> None:
    """Neither is one that a newer upload replaces; nothing is left behind."""
    # At the first part only: parts are sent at the same time, and one upload may overtake another.
    newer = iter([partial(mini.create, lines_of(1), "input/x.jsonl.gz")])

    def upload_newer() -> object:
        return next(newer, int)()

    long_file.at_part = upload_newer
    clock = count(time.time(), 10.0)
    batch = mini.ingest(long_file.batch, now=lambda: next(clock))
    assert batch.status is Status.CANCELLED
    assert len(long_file.sent) <= 2
    assert uploads_of(mini) == []


def test_a_file_that_is_cancelled_between_two_runs_leaves_nothing_behind(
    mini: Cloud, long_file: LongFile
) -> None:
    """The run that would have gone on gives the upload up."""
    batch = mini.ingest(long_file.batch, time_for(3))
    mini.run(cancel(mini.deployment, batch.id, int(time.time())))
    for message in mini.messages(mini.deployment.intake):
        step = IntakeStep(message["batch_id"], message["unit"])
        run_unit(mini.aws, mini.deployment, step, plenty)
    assert mini.batch(batch.id).status is Status.CANCELLED
    assert uploads_of(mini) == []


def test_a_file_is_made_plain_no_further_behind_its_window(
    mini: Cloud, long_file: LongFile
) -> None:
    """The run stops and sends a message; its handler lets the batch expire, and nothing is left."""
    late = long_file.batch.expires_at + 1
    batch = mini.ingest(long_file.batch, now=lambda: late + 10 * len(long_file.sent))
    assert batch.status is Status.VALIDATING
    assert mini.messages(mini.deployment.intake) == [intake_message(batch.id)]
    assert len(long_file.sent) <= 2
    advance(mini.aws, mini.deployment, batch.id, plenty, now=lambda: late)
    assert mini.batch(batch.id).status is Status.EXPIRED
    assert uploads_of(mini) == []


@pytest.mark.parametrize(
    "data",
    [gzip.compress(b"[" + b" " * 8 * MIB), gzip.compress(b"") * 10_000 + b"\x1f"],
    ids=["blanks", "empty members"],
)
def test_what_holds_no_bytes_is_looked_at_too(mini: Cloud, data: bytes) -> None:
    """A gigabyte of blanks is a megabyte of gzip, and minutes: clock and turn cannot wait."""
    looks: list[float] = []

    def time_left() -> float:
        looks.append(600.0)
        return looks[-1]

    assert mini.ingest(mini.create(data), time_left).status is Status.FAILED
    assert len(looks) > 10


def test_an_aborted_upload_is_started_again(mini: Cloud, long_file: LongFile) -> None:
    """A lifecycle rule may abort it, for instance."""
    batch = mini.ingest(long_file.batch, time_for(3))
    assert batch.conversion is not None
    upload_id = batch.conversion.upload
    mini.run(mini.deployment.bucket.abort_upload(converted_key(batch.id), upload_id))
    batch = mini.ingest(batch)
    assert (batch.status, batch.conversion) == (Status.VALIDATING, None)
    assert mini.messages(mini.deployment.intake)[-1] == intake_message(batch.id)
    assert mini.ingest(batch).status is Status.IN_PROGRESS


@pytest.mark.parametrize("stride", with_long([3], [1]))
def test_a_run_that_makes_a_file_plain_may_die_at_any_moment(mini: Cloud, stride: int) -> None:
    """Killed before any one of its requests, it is made good by the next."""
    results: list[Any] = []
    was_killed = True
    while was_killed:
        key = f"input/{len(results)}.gz"
        batch = mini.create(gzip.compress(lines_of(25)), key)
        run = partial(mini.ingest, batch)
        was_killed = is_killed_after(stride * len(results), mini.aws, run)
        left = mini.batch(batch.id)
        mini.run(mini.deployment.table.change_batch(left.id, left.status, turn_until=0))
        made = mini.ingest(left)
        assert made.status is Status.IN_PROGRESS
        results.append(places_of(mini.shards(batch.id)))
    assert stride * len(results) > 10
    # Of a run that died before it could write down which it had begun: S3 gives it up in a week.
    assert len(uploads_of(mini)) <= 1
    assert all(result == results[-1] for result in results)


@pytest.mark.parametrize("stride", with_long([3], [1]))
def test_a_run_that_finds_damage_may_die_at_any_moment(mini: Cloud, stride: int) -> None:
    """The next run reports the error in the file, not the missing upload."""
    num_calls, was_killed = 0, True
    while was_killed:
        batch = mini.create(gzip.compress(lines_of(25))[:-1], f"input/{num_calls}.gz")
        was_killed = is_killed_after(num_calls, mini.aws, partial(mini.ingest, batch))
        left = mini.batch(batch.id)
        mini.run(mini.deployment.table.change_batch(left.id, left.status, turn_until=0))
        refused = mini.ingest(left)
        assert refused.status is Status.FAILED
        assert "truncated after" in refused.errors[0].message
        num_calls += stride
    assert num_calls > 8
