"""Output and error objects: the sealed segments in line order, each object created once.

Every object is a multipart upload, however small: an upload can be completed only once, so a run
that was held up for long cannot overwrite later results. The batch stores the upload's ID and S3
lists its parts, so any run can resume where another one stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.errors import HandlerError
from tidemill.batch.object_keys import joined_prefix
from tidemill.batch.result_kinds import ResultKind

from ..aws.items import dump
from ..aws.objects.join import JoinUpload, join_groups, send_missing
from ..errors import NotThere
from ..lifecycle.batch_lock import BatchLock, Requeue
from ..observability import logger
from .result_files import BATCH_ID, find_made, record_file
from .sealed import SealedSegments, gather

_GONE = "NoSuchUpload"
_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 1.0, 60.0


def publish(lock: BatchLock) -> None:
    """Publish the objects of a batch whose shards are closed and record them; raises Requeue."""
    _wait_for_predecessor(lock)
    sealed = gather(lock)
    made: dict[ResultKind, Mapping[str, Any]] = {}
    for kind, segments in sealed.segments.items():
        if segments:
            made[kind] = _make_object(lock, kind, segments)
        elif any(sealed.segments.values()):
            # Errors of an older upload must not accompany a newer output.
            _remove_stale(lock, kind)
    changes: dict[str, object] = {}
    for kind, found in made.items():
        file_id = kind.file_id_of(lock.batch)
        record_file(lock, file_id, kind.key_of(lock.batch), found)
        changes |= kind.fields(file_id=file_id)
    batch = lock.batch
    errors = (*batch.errors, *sealed.errors)[:MAX_LISTED_ERRORS]
    lock.change(final=dump(sealed.progress), errors=[dump(error) for error in errors], **changes)


def _wait_for_predecessor(lock: BatchLock) -> None:
    """Let older batches of the key publish first; polls with growing intervals.

    A batch that has published had itself waited. One that ended without publishing (refused, or
    cancelled before any line ran) had not, and batches before it may still publish.
    """
    older_id = lock.batch.predecessor
    while older_id is not None:
        lock.check_deadline()
        older = lock.aws.run(lock.deployment.table.get_batch(older_id))
        if older is not None and not older.is_terminal:
            waited_seconds = lock.now() - (lock.batch.winds_up_since or 0)
            raise Requeue(min(_MAX_WAIT_SECONDS, max(_MIN_WAIT_SECONDS, waited_seconds / 8)))
        older_id = older.predecessor if older is not None and older.final is None else None


def _remove_stale(lock: BatchLock, kind: ResultKind) -> None:
    bucket, key = lock.deployment.bucket, kind.key_of(lock.batch)
    if found := lock.aws.run(bucket.head(key)):
        lock.renew()
        lock.aws.run(bucket.delete_found(key, found))


def _make_object(lock: BatchLock, kind: ResultKind, segments: SealedSegments) -> Mapping[str, Any]:
    """Upload the object unless it exists, and return its S3 metadata."""
    key, num_bytes = kind.key_of(lock.batch), segments.num_bytes
    if found := find_made(lock, key, num_bytes):
        return found
    bucket, prefix = lock.deployment.bucket, joined_prefix(lock.batch.id, kind.segments)
    joined = join_groups(lock.aws, bucket, segments, prefix, lock.check_deadline)
    upload = JoinUpload(key, _get_upload(lock, kind), joined)
    try:
        etags = send_missing(lock.aws, bucket, upload, lock.check_deadline)
        lock.renew()
        lock.aws.run(bucket.complete_upload(key, upload.id, etags))
    except NotThere as exc:
        if found := find_made(lock, key, num_bytes):
            return found
        if exc.aws_code != _GONE:
            raise
        _restart_upload(lock, kind, upload, exc)
    found = find_made(lock, key, num_bytes)
    if found is None:
        raise HandlerError(f"{key} is not the uploaded object")
    logger.info("published", batch_id=lock.batch.id, key=key, num_bytes=num_bytes)
    return found


def _get_upload(lock: BatchLock, kind: ResultKind) -> str:
    """Return the ID of the batch's upload; if two runs start one, the second aborts its own."""
    if known := kind.field(lock.batch, "joining"):
        return str(known)
    bucket, key = lock.deployment.bucket, kind.key_of(lock.batch)
    is_short_lived = lock.batch.options.output_expires_seconds is not None
    metadata = {BATCH_ID: lock.batch.id}
    mine = lock.aws.run(bucket.create_upload(key, metadata, is_short_lived=is_short_lived))
    chosen = lock.aws.run(
        lock.deployment.table.set_once(lock.batch.id, f"{kind.name}_joining", mine)
    )
    if chosen != mine:
        lock.aws.run(bucket.abort_upload(key, mine))
    return str(chosen)


def _restart_upload(
    lock: BatchLock, kind: ResultKind, upload: JoinUpload, cause: NotThere
) -> NoReturn:
    """Forget an upload that was aborted from outside, for instance by a lifecycle rule."""
    logger.warning("upload gone", batch_id=lock.batch.id, key=upload.key, reason=str(cause))
    lock.renew()
    lock.change(**kind.fields(joining=None))
    raise Requeue(_MIN_WAIT_SECONDS) from cause
