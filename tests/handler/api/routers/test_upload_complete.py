"""The end of an upload while others end it too, or while it is broken off, on each emulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from tests.handler.api.routers.test_uploads import data_of
from tests.handler.intake.rig import Cloud, plenty
from tidemill.batch.object_keys import file_key, upload_prefix
from tidemill.batch.stored_file import File, Upload
from tidemill.batch.upload_object import UploadRefused
from tidemill.handler.api.envelope.errors import NotFinished
from tidemill.handler.api.routers.upload_complete import Completion
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.stores.uploads import UploadStore
from tidemill.handler.errors import AwsError

SMALL = 4 * 2**20
DATA = data_of(5 * SMALL)
IDS = [f"part_{number}" for number in range(5)]


@pytest.fixture
def upload(any_cloud: Cloud) -> Upload:
    """Return an upload all of whose parts are there."""
    upload = Upload(
        f"upload_{uuid4().hex}",
        "lab",
        len(DATA),
        "x",
        "batch",
        1,
        4_000_000_000,
        f"file-{uuid4().hex}",
    )
    any_cloud.run(any_cloud.deployment.uploads.create_upload(upload))
    for number, part_id in enumerate(IDS):
        part = DATA[number * SMALL : (number + 1) * SMALL]
        any_cloud.run(any_cloud.deployment.bucket.put(f"{upload_prefix(upload.id)}{part_id}", part))
    return upload


def completion(cloud: Cloud, upload: Upload) -> Completion:
    """Return what one call does that finds the upload as it is now."""
    now = cloud.run(cloud.deployment.uploads.get_upload(upload.id))
    assert now is not None
    return Completion(cloud.aws, cloud.deployment, now, plenty)


def file_of(cloud: Cloud, upload: Upload) -> tuple[File | None, bytes | None]:
    """Return the file of an upload and its bytes, as far as they are there."""
    key = file_key(upload.tenant, upload.file_id)
    data = cloud.run(cloud.deployment.bucket.get(key)) if cloud.has_object(key) else None
    return cloud.run(cloud.deployment.files.get_file(upload.file_id)), data


def test_calls_at_the_same_time_make_one_file(any_cloud: Cloud, upload: Upload) -> None:
    """After a client's timeout and retry, each call returns the file, or must be repeated."""
    calls = [completion(any_cloud, upload) for _ in range(4)]

    def complete(call: Completion) -> str:
        try:
            return call.complete(IDS, None).status
        except NotFinished:
            return "again"

    with ThreadPoolExecutor(4) as pool:
        outcomes = set(pool.map(complete, calls))
    assert outcomes <= {"completed", "again"}
    assert completion(any_cloud, upload).complete(IDS, None).status == "completed"
    file, data = file_of(any_cloud, upload)
    assert file is not None
    assert data == DATA


@pytest.mark.parametrize("broken", ["note_multipart", "complete_upload"])
def test_a_call_that_broke_off_is_finished_by_the_next(
    any_cloud: Cloud, upload: Upload, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was: before S3's upload was known, or when all but the record was made."""

    def fail(*_: Any) -> Any:
        raise AwsError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(UploadStore, broken, fail)
        with pytest.raises(AwsError):
            completion(any_cloud, upload).complete(IDS, None)
        assert file_of(any_cloud, upload)[0] is None
    assert completion(any_cloud, upload).complete(IDS, None).status == "completed"
    file, data = file_of(any_cloud, upload)
    assert file is not None
    assert file.num_bytes == len(DATA)
    assert data == DATA


@pytest.mark.parametrize("method", ["upload_part", "complete_upload", "head"])
def test_an_upload_that_is_cancelled_meanwhile_leaves_nothing(
    any_cloud: Cloud, upload: Upload, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves nothing, whether its parts are being joined or are already joined."""
    if (any_cloud.emulator.name, method) == ("moto", "complete_upload"):
        pytest.skip("moto itself fails to complete an aborted upload")
    act = getattr(Bucket, method)
    cancels = iter([True])

    def cancelled(bucket: Bucket, *arguments: Any) -> Any:
        # The object is looked for once before it is made.
        if method == "head" and not any_cloud.run(act(bucket, *arguments)):
            return (yield from act(bucket, *arguments))
        if next(cancels, False):
            other = completion(any_cloud, upload)
            other.upload = any_cloud.run(any_cloud.deployment.uploads.cancel_upload(upload))
            other.clear()
        return (yield from act(bucket, *arguments))

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, method, cancelled)
        with pytest.raises(NotFinished):
            completion(any_cloud, upload).complete(IDS, None)
    assert next(cancels, None) is None
    with pytest.raises(UploadRefused, match="cancelled"):
        completion(any_cloud, upload).complete(IDS, None)
    assert file_of(any_cloud, upload) == (None, None)
