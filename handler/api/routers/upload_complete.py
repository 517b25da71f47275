"""Completion of an upload: its parts become one object, and the object becomes a file.

A run that is out of time reports this, and the next call resumes it: S3 knows which parts are
stored. The file exists only once all of its bytes are stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import md5, sha256
from typing import Any, Final

from tidemill.batch.object_keys import file_key, upload_prefix
from tidemill.batch.result_kinds import SealedSegment
from tidemill.batch.stored_file import Upload, UploadWay
from tidemill.batch.upload_object import (
    UPLOAD_ID,
    check_pending,
    check_sent_to_urls,
    check_uploaded,
    file_of_upload,
    parts_mismatch,
    sizes_of_parts,
    wrong_md5,
)

from ...aws.objects.join import JoinUpload, send_missing
from ...aws.sync import Aws
from ...deployment import Deployment
from ...errors import AwsError, NotThere
from ..envelope.errors import NotFinished, Refused

MAX_MD5_BYTES: Final = 256 * 2**20
# Time that S3 may take to complete an upload of many parts, and the table to record it.
_RESERVE_SECONDS: Final = 8.0
_CHUNK_BYTES: Final = 2**20
# S3's error codes for a part that was sent again since it was listed.
_CHANGED: Final = frozenset({"InvalidPart", "InvalidPartOrder"})


@dataclass(slots=True)
class Completion:
    """One call's work on an upload; `time_left` returns the seconds until its deadline."""

    aws: Aws
    deployment: Deployment
    upload: Upload
    time_left: Callable[[], float]

    @property
    def key(self) -> str:
        """The key of the object that the file will be."""
        return file_key(self.upload.tenant, self.upload.file_id)

    def begin(self, way: UploadWay, digest: str, expires_at: int) -> Upload:
        """Fix how the parts come and start S3's upload; raises UploadRefused for another way."""
        store, bucket = self.deployment.uploads, self.deployment.bucket
        if self.upload.way is None:
            self._take(self.aws.run(store.choose(self.upload, way, digest, expires_at)))
        self._check_way(way, digest)
        if self.upload.multipart_id is None:
            mine = self.aws.run(
                bucket.create_upload(
                    self.key,
                    {UPLOAD_ID: self.upload.id},
                    is_short_lived=self.upload.file_seconds is not None,
                )
            )
            self._take(self.aws.run(store.note_multipart(self.upload, mine)))
            if self.upload.multipart_id != mine:
                self.aws.run(bucket.abort_upload(self.key, mine))
        return self.upload

    def complete(self, part_ids: Sequence[str], wanted_md5: str | None) -> Upload:
        """Return the completed upload; raises UploadRefused, or NotFinished at the deadline."""
        digest = sha256("\n".join(part_ids).encode()).hexdigest() if part_ids else ""
        if self.upload.status == "completed" and self.upload.digest == digest:
            return self.upload
        check_pending(self.upload, time.time())
        if self.upload.way is not None:
            self._check_way("parts" if part_ids else "urls", digest)
        self._check_md5(wanted_md5)
        found = self._find()
        if found is None:
            if part_ids:
                self._join(self._segments(part_ids), digest)
            else:
                self._close()
            found = self._find()
        if found is None:
            raise NotFinished
        if wanted_md5 is not None and self._md5() != wanted_md5.lower():
            self._give_up()
        self._record(found)
        return self.upload

    def clear(self) -> None:
        """Delete the leftovers of an upload that has ended."""
        bucket = self.deployment.bucket
        if self.upload.status == "cancelled" and self.upload.multipart_id is not None:
            self.aws.run(bucket.abort_upload(self.key, self.upload.multipart_id))
            if self._find() is not None:
                self.aws.run(bucket.delete(self.key))
        parts = self.aws.run(bucket.list_sizes(upload_prefix(self.upload.id)))
        self.aws.run(bucket.delete_all(list(parts)))

    def _check_way(self, way: UploadWay, digest: str) -> None:
        if (self.upload.way, self.upload.digest) != (way, digest):
            raise parts_mismatch()

    def _take(self, upload: Upload) -> None:
        if upload.status == "completed":
            # Completed by a concurrent call: the next call returns it.
            raise NotFinished
        check_pending(upload, time.time())
        self.upload = upload

    def _check(self) -> None:
        if self.time_left() < _RESERVE_SECONDS:
            raise NotFinished

    def _find(self) -> Any:
        """Return the S3 metadata of the object once it is complete."""
        if self.upload.multipart_id is None:
            return None
        return self.aws.run(self.deployment.bucket.head(self.key))

    def _segments(self, part_ids: Sequence[str]) -> list[SealedSegment]:
        """Return the parts as objects; raises UploadRefused unless they are the file's bytes."""
        prefix = upload_prefix(self.upload.id)
        found = self.aws.run(self.deployment.bucket.list_sizes(prefix))
        there = {key.removeprefix(prefix): size for key, size in found.items()}
        sizes = sizes_of_parts(self.upload, part_ids, there)
        return [
            SealedSegment(f"{prefix}{part_id}", size)
            for part_id, size in zip(part_ids, sizes, strict=True)
        ]

    def _join(self, segments: Sequence[SealedSegment], digest: str) -> None:
        upload = self.begin("parts", digest, self.upload.expires_at)
        bucket, multipart_id = self.deployment.bucket, str(upload.multipart_id)
        try:
            joining = JoinUpload(self.key, multipart_id, segments)
            etags = send_missing(self.aws, bucket, joining, self._check)
            self._check()
            self.aws.run(bucket.complete_upload(self.key, multipart_id, etags))
        except NotThere as exc:
            # Another call was quicker, or the upload was cancelled in the meantime.
            raise NotFinished from exc

    def _close(self) -> None:
        """Have S3 join the parts that were sent to URLs; raises UploadRefused for missing ones."""
        check_sent_to_urls(self.upload)
        upload = self.begin("urls", "", self.upload.expires_at)
        bucket, multipart_id = self.deployment.bucket, str(upload.multipart_id)
        try:
            found = self.aws.run(bucket.list_uploaded(self.key, multipart_id))
            check_uploaded(self.upload, {number: size for number, (_, size) in found.items()})
            etags = {number: etag for number, (etag, _) in found.items()}
            self.aws.run(bucket.complete_upload(self.key, multipart_id, etags))
        except NotThere as exc:
            raise NotFinished from exc
        except AwsError as exc:
            if exc.aws_code in _CHANGED:
                raise NotFinished from exc
            raise

    def _check_md5(self, wanted: str | None) -> None:
        if wanted is not None and self.upload.num_bytes > MAX_MD5_BYTES:
            raise Refused(
                f"`md5` is supported for files of up to {MAX_MD5_BYTES:,} bytes: leave it out.",
                param="md5",
                code="md5_unchecked",
            )

    def _md5(self) -> str:
        digest = md5(usedforsecurity=False)
        where = {"Bucket": self.deployment.bucket.name, "Key": self.key}
        with closing(self.aws.open(**where)) as body:
            while chunk := body.read(_CHUNK_BYTES):
                self._check()
                digest.update(chunk)
        return digest.hexdigest()

    def _give_up(self) -> None:
        """End an upload whose bytes do not match the client's declaration."""
        self.upload = self.aws.run(self.deployment.uploads.cancel_upload(self.upload))
        self.clear()
        raise wrong_md5()

    def _record(self, found: Any) -> None:
        upload, now = self.upload, int(time.time())
        file = file_of_upload(
            upload,
            self.key,
            now,
            kept_until=self.deployment.settings.file_expires_at(now),
            version_id=found.get("VersionId"),
        )
        self.upload = self.aws.run(self.deployment.uploads.complete_upload(upload, file))
        self.clear()
        if self.upload.status != "completed":
            check_pending(self.upload, now)
