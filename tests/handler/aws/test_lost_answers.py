"""Lost replies: AWS did the work, and a retry finds it done once.

Each operation loses the reply to each of its calls in turn and is then repeated, as workers and
Lambdas do. Its result and its effects must be as if no reply had been lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

from tests.emulators import active_ids
from tests.handler.aws.conftest import Run
from tests.handler.aws.given import LEASE_SECONDS, NOW, claimed, in_progress, make_batch
from tidemill.batch.file.formats import FileFormat
from tidemill.batch.intake_progress import Phase, WorkUnit, new_progress
from tidemill.batch.model import Batch, Shard
from tidemill.batch.parts import FinishedRow, PartIndex, encode_part
from tidemill.batch.progress_counts import Progress
from tidemill.batch.shard_cutter import ShardLimits
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File, Upload
from tidemill.handler.aws.calls import Operation, T
from tidemill.handler.aws.stores.drops import Arrival
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError, NotThere

PROGRESS = Progress(7, 3, 70, 7, 21, 1.25)
LATER = NOW + LEASE_SECONDS + 1


class Case(NamedTuple):
    """An operation that can be made again and again, and one that looks at all it may change."""

    make: Callable[[], Operation[Any]]
    look: Callable[[], Operation[Any]]


def losing(operation: Operation[T], number: int) -> Operation[T]:
    """Lose the answer of the `number`th call (from 0) of an operation."""
    call = next(operation)
    try:
        while True:
            try:
                response = yield call
            except AwsError as exc:
                call = operation.throw(exc)
            else:
                is_lost = number == 0
                number -= 1
                lost = AwsError("the answer was lost")
                call = operation.throw(lost) if is_lost else operation.send(response)
    except StopIteration as stop:
        result: T = stop.value
        return result


def all_of(deployment: Deployment, *batch_ids: str) -> Operation[list[Any]]:
    """Return everything that the table knows of some batches."""
    table, found = deployment.table, []
    active = yield from active_ids(table)
    for batch_id in batch_ids:
        batch = yield from table.get_batch(batch_id)
        shards = yield from table.list_shards(batch_id)
        newest = (
            (yield from table.newest_drop(batch.source.bucket, batch.outputs)) if batch else None
        )
        found += [batch, shards, newest, batch_id in active]
    return found


def creating(deployment: Deployment) -> Operation[Case]:
    """Return a request's batch."""
    batch = make_batch(deployment)
    yield from ()
    return Case(lambda: deployment.table.create_batch(batch), lambda: all_of(deployment, batch.id))


def dropping(deployment: Deployment) -> Operation[Case]:
    """Return the batch of an upload that replaces an older one."""
    old = make_batch(deployment)
    new = make_batch(deployment, old.source.key)
    yield from deployment.table.create_drop(old, Arrival("0A", NOW))
    return Case(
        lambda: deployment.table.create_drop(new, Arrival("0B", NOW)),
        lambda: all_of(deployment, old.id, new.id),
    )


def of_batch(
    act: Callable[[Deployment, str], Operation[Any]],
) -> Callable[[Deployment], Operation[Case]]:
    """Return the case of an operation on a running batch of two shards."""

    def prepare(deployment: Deployment) -> Operation[Case]:
        batch = yield from in_progress(deployment, 2)
        return Case(lambda: act(deployment, batch.id), lambda: all_of(deployment, batch.id))

    return prepare


def of_shard(
    act: Callable[[Deployment, Shard], Operation[Any]],
) -> Callable[[Deployment], Operation[Case]]:
    """Return the case of an operation on a claimed shard."""

    def prepare(deployment: Deployment) -> Operation[Case]:
        shard = yield from claimed(deployment)
        return Case(lambda: act(deployment, shard), lambda: all_of(deployment, shard.batch_id))

    return prepare


def of_objects(
    act: Callable[[Deployment, Shard], Operation[Any]],
) -> Callable[[Deployment], Operation[Case]]:
    """Return the case of an operation on the objects of a shard that has a part."""

    def prepare(deployment: Deployment) -> Operation[Case]:
        shard, bucket = Shard(f"batch_{uuid4().hex}", 0, 1, 3, 0, 9, fence=1), deployment.bucket
        yield from bucket.put_part(shard, 0, PART)

        def look() -> Operation[list[Any]]:
            found = []
            for key in (yield from bucket.list_keys(f"work/{shard.batch_id}/")):
                body = yield from bucket.get(key)
                found.append((key, body))
            return found

        return Case(lambda: act(deployment, shard), look)

    return prepare


PART = encode_part(FinishedRow(line, b'{"n":%d}\n' % line, line != 2) for line in (1, 2, 3))


def sealing(deployment: Deployment, shard: Shard) -> Operation[None]:
    """Index the parts and write the segments."""
    index: PartIndex = yield from deployment.bucket.index_parts(
        shard.batch_id, 0, left_out=lambda *_: None
    )
    yield from deployment.bucket.put_segments(shard, index.seal(segment_bytes=1))


def completing(deployment: Deployment) -> Operation[Case]:
    """Return an upload whose end is NotThere when it was completed already."""
    bucket, key = deployment.bucket, f"output/{uuid4().hex}.jsonl"
    upload_id = yield from bucket.create_upload(key, {"n": "1"})
    etag = yield from bucket.upload_part(key, upload_id, 1, BytesIO(b"abc"))

    def complete() -> Operation[None]:
        try:
            yield from bucket.complete_upload(key, upload_id, {1: etag})
        except NotThere:
            return

    return Case(complete, lambda: bucket.get(key))


def keeping(deployment: Deployment, batch_id: str) -> Operation[Batch | None]:
    """Take the turn, and keep it."""
    yield from deployment.table.acquire_lock(batch_id, "me", now=NOW, until=NOW + 9)
    return (yield from deployment.table.renew_lock(batch_id, "me", until=NOW + 19))


def turning(deployment: Deployment, batch_id: str) -> Operation[Batch | None]:
    """Take the turn and give it back."""
    yield from deployment.table.acquire_lock(batch_id, "me", now=NOW, until=NOW + 9)
    return (yield from deployment.table.release_lock(batch_id, "me"))


def moving(deployment: Deployment) -> Operation[Case]:
    """Return a move that releases the lock of its run."""
    table = deployment.table
    batch = yield from table.create_batch(make_batch(deployment, turn="me", turn_until=NOW + 9.0))
    return Case(
        lambda: table.move_batch(batch.id, Status.IN_PROGRESS, NOW + 9, lock_owner="me"),
        lambda: all_of(deployment, batch.id),
    )


def noting(deployment: Deployment, batch_id: str) -> Operation[bool]:
    """Mark a batch's status as announced."""
    batch = yield from deployment.table.get_batch(batch_id)
    assert batch is not None
    return (yield from deployment.table.note_announced(batch))


def without_result(operation: Operation[bool]) -> Operation[None]:
    """Run an operation whose result is True only for the first call, and ignore the result."""
    yield from operation


def filing(deployment: Deployment) -> Operation[Case]:
    """Return a file's record."""
    file = File(f"file-{uuid4().hex}", "t", "k", 5, NOW, "n", "batch_output")
    yield from ()
    return Case(lambda: deployment.files.put_file(file), lambda: deployment.files.get_file(file.id))


def of_upload(
    make: Callable[[Deployment, Upload, File], Operation[Any]],
) -> Callable[[Deployment], Operation[Case]]:
    """Return a case of an upload and the file that it becomes."""

    def case(deployment: Deployment) -> Operation[Case]:
        file_id = f"file-{uuid4().hex}"
        upload = Upload(f"upload_{uuid4().hex}", "t", 5, "n", "batch", NOW, NOW + 60, file_id)
        file = File(file_id, "t", "k", 5, NOW, "n", "batch")
        yield from deployment.uploads.create_upload(upload)
        return Case(lambda: make(deployment, upload, file), lambda: look(deployment, upload))

    def look(deployment: Deployment, upload: Upload) -> Operation[Any]:
        now = yield from deployment.uploads.get_upload(upload.id)
        return now, (yield from deployment.files.get_file(upload.file_id))

    return case


READING = new_progress(FileFormat(), ShardLimits(), 25, 10, None)
SCAN = WorkUnit(Phase.SCAN, 0)


def of_reading(
    act: Callable[[Deployment, str], Operation[Any]],
) -> Callable[[Deployment], Operation[Case]]:
    """Return the case of an operation on how far intake has come with a file of three ranges."""

    def prepare(deployment: Deployment) -> Operation[Case]:
        name = f"batch_{uuid4().hex}"
        yield from deployment.intake_progress.get_or_create(name, READING)
        look = deployment.intake_progress.get_progress
        return Case(lambda: act(deployment, name), lambda: look(name))

    return prepare


CASES: dict[str, Callable[[Deployment], Operation[Case]]] = {
    "create_batch": creating,
    "create_drop": dropping,
    "move_batch": of_batch(
        lambda d, id_: d.table.move_batch(
            id_, Status.FINALIZING, NOW + 9, outcome=str(Status.COMPLETED)
        )
    ),
    "move_under_lock": moving,
    "change_batch": of_batch(
        lambda d, id_: d.table.change_batch(
            id_, Status.IN_PROGRESS, output_joining="here", model=None, num_errors=2
        )
    ),
    "set_once": of_batch(lambda d, id_: d.table.set_once(id_, "ended_at", NOW + 9)),
    "choose_end": of_batch(lambda d, id_: d.table.choose_end(id_, Status.EXPIRED, NOW + 9)),
    "acquire_lock": of_batch(
        lambda d, id_: d.table.acquire_lock(id_, "me", now=NOW, until=NOW + 9)
    ),
    "renew_lock": of_batch(keeping),
    "release_lock": of_batch(turning),
    "forget_active": of_batch(lambda d, id_: d.table.forget_active(f"default#{id_}")),
    "new_progress": of_reading(lambda d, id_: d.intake_progress.get_or_create(id_, READING)),
    "complete_unit": of_reading(lambda d, id_: d.intake_progress.complete_unit(id_, SCAN)),
    "add_unit": of_reading(lambda d, id_: d.intake_progress.add_unit(id_, SCAN.rest)),
    "note_enqueued": of_reading(lambda d, id_: d.intake_progress.note_enqueued(id_, Phase.SCAN)),
    "start_phase": of_reading(
        lambda d, id_: d.intake_progress.start_phase(
            id_, READING.in_phase(Phase.SEARCH, [WorkUnit(Phase.SEARCH, 0)]), Phase.SCAN
        )
    ),
    "put_shard": of_batch(lambda d, id_: d.table.put_shard(Shard(id_, 2, 21, 5, 200, 250))),
    "forget_shards": of_batch(lambda d, id_: d.table.forget_shards(id_, 1)),
    "claim": of_batch(
        lambda d, id_: d.table.claim(
            id_, 1, owner="me", now=NOW, lease_seconds=LEASE_SECONDS, steal=False
        )
    ),
    "renew": of_shard(
        lambda d, shard: d.table.renew(shard, lease_until=LATER, progress=PROGRESS, attempts=0)
    ),
    "release": of_shard(
        lambda d, shard: d.table.release(
            shard, progress=PROGRESS, suspects=((1, 2), (3,)), quarantined=(4,), attempts=1
        )
    ),
    "abandon": of_shard(lambda d, shard: without_result(d.table.abandon(shard.batch_id, 0, "why"))),
    "note_announced": of_batch(lambda d, id_: without_result(noting(d, id_))),
    "commit": of_shard(
        lambda d, shard: d.table.commit(
            shard, progress=PROGRESS, output_sizes=[5, 6], error_sizes=[]
        )
    ),
    "put_file": filing,
    "create_upload": of_upload(lambda d, upload, _: d.uploads.create_upload(upload)),
    "choose": of_upload(lambda d, upload, _: d.uploads.choose(upload, "urls", "", NOW + 90)),
    "note_multipart": of_upload(lambda d, upload, _: d.uploads.note_multipart(upload, "1")),
    "cancel_upload": of_upload(lambda d, upload, _: d.uploads.cancel_upload(upload)),
    "end_upload": of_upload(lambda d, upload, file: d.uploads.complete_upload(upload, file)),
    "put": of_objects(
        lambda d, shard: d.bucket.put(f"work/{shard.batch_id}/x", b"body", "text/plain")
    ),
    "put_part": of_objects(lambda d, shard: d.bucket.put_part(shard, 1, PART)),
    "put_segments": of_objects(sealing),
    "delete": of_objects(
        lambda d, shard: d.bucket.delete(f"work/{shard.batch_id}/0000000/part-000001-000000")
    ),
    "complete_upload": completing,
}


def named(found: object) -> str:
    """Return the words of a value with its random ids replaced by their order."""
    text = repr(found)
    ids = list(dict.fromkeys(re.findall(r"[0-9a-f]{32}", text)))
    return re.sub(r"[0-9a-f]{32}", lambda match: f"<{ids.index(match[0])}>", text)


@pytest.mark.parametrize("name", CASES)
def test_a_lost_answer_changes_nothing(name: str, run: Run, deployment: Deployment) -> None:
    """Whichever answer is lost, once: the second try returns and leaves what one try would."""
    case = run(CASES[name](deployment))
    expected = named((run(case.make()), run(case.look())))
    number = 0
    while True:
        case = run(CASES[name](deployment))
        try:
            run(losing(case.make(), number))
        except AwsError:
            result = run(case.make())
        else:
            break
        assert named((result, run(case.look()))) == expected
        number += 1
    assert number > 0
