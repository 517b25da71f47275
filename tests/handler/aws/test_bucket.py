"""Objects: pinned reads, parts and seals, uploads of many parts."""

from __future__ import annotations

import io
from contextlib import suppress
from uuid import uuid4

import pytest

from tests.emulators import Emulator
from tests.handler.aws.conftest import Run
from tidemill.batch.model import Shard, Source
from tidemill.batch.object_keys import part_key, segment_key
from tidemill.batch.parts import FinishedRow, PartIndex, decode_index, encode_part
from tidemill.handler.aws.bucket import Bucket, read_range
from tidemill.handler.aws.calls import Operation
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import NotThere, ObjectChanged
from tidemill.protocol.contract import Usage

MIB = 2**20


def pinned(run: Run, deployment: Deployment, body: bytes, *, versioned: bool) -> Source:
    """Write an object and return it as intake pins it."""
    key = f"input/{uuid4().hex} é+&.jsonl"
    run(deployment.bucket.put(key, body))
    found = run(deployment.bucket.head(key))
    assert found is not None
    version_id = found["VersionId"] if versioned else None
    return Source(deployment.bucket.name, key, found["ETag"], len(body), version_id)


@pytest.mark.parametrize("versioned", [False, True])
def test_a_range_of_the_pinned_object_is_read(
    run: Run, deployment: Deployment, *, versioned: bool
) -> None:
    """The range is from `start` up to `end`; an empty range makes no request."""
    source = pinned(run, deployment, b"0123456789", versioned=versioned)
    assert run(read_range(source, 2, 5)) == b"234"
    assert run(read_range(source, 0, 10)) == b"0123456789"
    assert run(read_range(source, 5, 5)) == b""


def test_an_object_that_was_overwritten_is_read_by_its_version(
    run: Run, deployment: Deployment
) -> None:
    """With its version it is still what it was; without one it has changed."""
    by_version = pinned(run, deployment, b"0123456789", versioned=True)
    run(deployment.bucket.put(by_version.key, b"another thing"))
    by_etag = Source(by_version.bucket, by_version.key, by_version.etag, 10)
    assert run(read_range(by_version, 2, 5)) == b"234"
    with pytest.raises(ObjectChanged):
        run(read_range(by_etag, 2, 5))


def test_an_object_that_has_gone_is_not_there(
    run: Run, deployment: Deployment, emulator: Emulator
) -> None:
    """Its version and its key are both gone, which reads and HEAD requests report."""
    source = pinned(run, deployment, b"0123456789", versioned=True)
    emulator.client("s3").delete_object(
        Bucket=source.bucket, Key=source.key, VersionId=source.version_id
    )
    with pytest.raises(NotThere):
        run(read_range(source, 2, 5))
    with pytest.raises(NotThere):
        run(deployment.bucket.get(source.key))
    assert run(deployment.bucket.head(source.key)) is None


def test_keys_are_listed_in_order(run: Run, deployment: Deployment) -> None:
    """The order of writing does not matter; a deleted key is not listed."""
    prefix = f"list/{uuid4().hex}/"
    keys = [f"{prefix}{number:04}" for number in range(12)]
    for key in reversed(keys):
        run(deployment.bucket.put(key, b""))
    assert run(deployment.bucket.list_keys(prefix)) == keys
    run(deployment.bucket.delete(keys[0]))
    assert run(deployment.bucket.list_keys(prefix)) == keys[1:]


def test_keys_are_listed_over_pages() -> None:
    """S3 returns a thousand at a time; the token of each page requests the next."""
    listing = Bucket("b").list_keys("p")
    first = next(listing)
    assert "ContinuationToken" not in first.arguments
    answer = {"Contents": [{"Key": "a"}], "IsTruncated": True, "NextContinuationToken": "t"}
    second = listing.send(answer)
    assert second.arguments["ContinuationToken"] == "t"
    with pytest.raises(StopIteration) as end:
        listing.send({"Contents": [{"Key": "b"}], "IsTruncated": False})
    assert end.value.value == ["a", "b"]


def row(line: int, words: str, *, is_success: bool = True) -> FinishedRow:
    """Return the row of a line."""
    return FinishedRow(
        line, f'{{"line": {line}, "words": "{words}"}}\n'.encode(), is_success, Usage(1)
    )


def test_an_object_that_was_replaced_is_not_deleted(run: Run, deployment: Deployment) -> None:
    """An object that came later stays, and a missing one is not an error."""
    bucket, key = deployment.bucket, f"stale/{uuid4().hex}"
    run(bucket.put(key, b"old"))
    old = run(bucket.head(key))
    run(bucket.put(key, b"new"))
    new = run(bucket.head(key))
    assert old is not None
    assert new is not None
    run(bucket.delete_found(key, old))
    assert run(bucket.get(key)) == b"new"
    for _ in range(2):
        run(bucket.delete_found(key, new))
    assert run(bucket.head(key)) is None


def test_a_version_that_is_replaced_while_it_is_deleted_stays(
    run: Run, deployment: Deployment
) -> None:
    """A newer one may come between the look and the deletion: only the one seen goes."""
    bucket, key = deployment.bucket, f"version/{uuid4().hex}"
    version_id = run(bucket.put_file(key, b"old", is_short_lived=False))
    deletion = bucket.delete_version(key, version_id)

    def overtaken() -> Operation[None]:
        found = yield next(deletion)
        yield from bucket.put(key, b"new")
        with suppress(ObjectChanged):
            yield deletion.send(found)

    run(overtaken())
    assert run(bucket.get(key)) == b"new"


def test_parts_are_read_by_their_headers(run: Run, deployment: Deployment) -> None:
    """Megabytes of rows are not read to learn which lines have one."""
    bucket, shard = deployment.bucket, Shard(f"batch_{uuid4().hex}", 0, 1, 2, 0, 9, fence=1)
    run(bucket.put_part(shard, 0, encode_part([row(n, "x" * 100_000) for n in (1, 2)])))
    num_bytes = 0

    def counted(operation: Operation[PartIndex]) -> Operation[PartIndex]:
        nonlocal num_bytes
        answer = None
        while True:
            try:
                call = operation.send(answer)
            except StopIteration as end:
                return end.value
            answer = yield call
            num_bytes += len(answer.get("Body", b""))

    index = run(counted(bucket.index_parts(shard.batch_id, 0, left_out=lambda *_: None)))
    assert index.lines == {1, 2}
    assert 0 < num_bytes < 100_000


def test_parts_of_all_owners_become_segments_in_line_order(
    run: Run, deployment: Deployment
) -> None:
    """If a line has two rows, the older fencing token's counts; a torn part is reported."""
    bucket = deployment.bucket
    batch_id = f"batch_{uuid4().hex}"
    old, new = (Shard(batch_id, 3, 1, 5, 0, 9, fence=fence) for fence in (1, 2))
    run(bucket.put_part(new, 0, encode_part([row(1, "new"), row(5, "new")])))
    run(bucket.put_part(old, 0, encode_part([row(4, "old"), row(1, "old")])))
    run(bucket.put_part(new, 1, encode_part([row(3, "bad", is_success=False), row(2, "new")])))
    torn = part_key(batch_id, 3, 2, 2)
    run(bucket.put(torn, encode_part([row(2, "torn")])[:-3]))
    left_out: list[str] = []
    index = run(bucket.index_parts(batch_id, 3, left_out=lambda key, _: left_out.append(key)))
    assert left_out == [torn]
    assert index.lines == {1, 2, 3, 4, 5}
    run(bucket.put_segments(new, index.seal(segment_bytes=50)))
    names = [segment_key(batch_id, 3, 2, "output", number) for number in range(2)]
    assert [run(bucket.get(name)) for name in names] == [
        row(1, "old").row + row(2, "new").row,
        row(4, "old").row + row(5, "new").row,
    ]
    assert run(bucket.get(segment_key(batch_id, 3, 2, "errors", 0))) == row(3, "bad").row


def test_rows_that_alternate_between_parts_come_out_in_order(
    run: Run, deployment: Deployment
) -> None:
    """Each part is read once for a segment, from its first row to its last."""
    bucket, shard = deployment.bucket, Shard(f"batch_{uuid4().hex}", 0, 1, 9, 0, 9, fence=1)
    for part in range(3):
        run(bucket.put_part(shard, part, encode_part(row(n, "x") for n in range(part, 9, 3))))
    index = run(bucket.index_parts(shard.batch_id, 0, left_out=lambda *_: None))
    reads = []

    def counted(operation: Operation[None]) -> Operation[None]:
        answer = None
        with suppress(StopIteration):
            while True:
                call = operation.send(answer)
                if call.method == "get_object":
                    reads.append(call.arguments["Key"])
                answer = yield call

    run(counted(bucket.put_segments(shard, index.seal())))
    body = run(bucket.get(segment_key(shard.batch_id, 0, 1, "output", 0)))
    assert body == b"".join(row(line, "x").row for line in range(9))
    assert len(reads) == len(set(reads)) == 3


def test_a_part_has_an_index_of_its_rows(run: Run, deployment: Deployment) -> None:
    """The index is read as it was written."""
    data = encode_part([row(1, "é"), row(2, "b")])
    key = run(deployment.bucket.put_part(Shard("batch_p", 0, 1, 2, 0, 9, fence=1), 0, data))
    assert decode_index(run(deployment.bucket.get(key))) == decode_index(data)


def test_an_upload_of_parts_sent_and_copied_becomes_one_object(
    run: Run, deployment: Deployment
) -> None:
    """Parts are listed with their bytes, and completing takes them in the order of numbers."""
    bucket, key = deployment.bucket, f"output/{uuid4().hex}.jsonl"
    run(bucket.put(f"{key}.source", b"a" * 5 * MIB))
    upload_id = run(bucket.create_upload(key, {"batch-id": "b"}))
    etags = {2: run(bucket.upload_part(key, upload_id, 2, io.BytesIO(b"tail")))}
    etags[1] = run(bucket.copy_part(key, upload_id, 1, f"{key}.source"))
    listed = run(bucket.list_uploaded(key, upload_id))
    assert {number: size for number, (_, size) in listed.items()} == {1: 5 * MIB, 2: 4}
    run(bucket.complete_upload(key, upload_id, etags))
    found = run(bucket.head(key))
    assert found is not None
    assert found["Metadata"] == {"batch-id": "b"}
    assert run(bucket.get(key)) == b"a" * 5 * MIB + b"tail"


def test_an_upload_that_was_given_up_is_gone(run: Run, deployment: Deployment) -> None:
    """A second abort is not an error; the upload's parts cannot be listed."""
    bucket, key = deployment.bucket, f"output/{uuid4().hex}.jsonl"
    upload_id = run(bucket.create_upload(key, {}))
    run(bucket.abort_upload(key, upload_id))
    run(bucket.abort_upload(key, upload_id))
    with pytest.raises(NotThere):
        run(bucket.list_uploaded(key, upload_id))
    assert run(bucket.head(key)) is None
