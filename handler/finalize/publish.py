"""Output and error objects: the sealed segments in the order of lines, each object made once.

Every object is a multipart upload, however small: an upload can be completed only once, so a run
that was held up for long cannot write over what came later. The id of the upload stands in the
batch and S3 lists which parts are there, so any run can go on where another one stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from handler.aws.items import dump
from handler.batch.keys import joined_prefix
from handler.batch.kinds import Kind
from handler.batch.model import Batch, File
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.errors import HandlerError, NotThere
from handler.finalize.sealed import SealedSegments, gather
from handler.log import logger
from handler.moves.turn import ComeBack, Run
from handler.objects.join import Joining, join_groups, send_missing

BATCH_ID = "batch-id"

_GONE = "NoSuchUpload"
_MIN_WAIT_SECONDS, _MAX_WAIT_SECONDS = 1.0, 60.0


def publish(run: Run) -> None:
    """Make the objects of a batch whose shards are closed and record them; raises ComeBack."""
    _wait_for_predecessor(run)
    sealed = gather(run)
    made: dict[Kind, Mapping[str, Any]] = {}
    for kind, segments in sealed.segments.items():
        if segments:
            made[kind] = _make_object(run, kind, segments)
        elif any(sealed.segments.values()):
            # Errors of an older upload must not stand beside a newer output.
            _remove_stale(run, kind)
    changes: dict[str, object] = {}
    for kind, found in made.items():
        _record_file(run, kind, sealed.segments[kind].num_bytes, found.get("VersionId"))
        changes |= kind.fields(file_id=kind.file_id_of(run.batch))
    batch = run.batch
    errors = (*batch.errors, *sealed.errors)[:MAX_LISTED_ERRORS]
    run.change(final=dump(sealed.progress), errors=[dump(error) for error in errors], **changes)


def _wait_for_predecessor(run: Run) -> None:
    """Let older batches of the key publish first; look the rarer the longer it takes.

    One that has published had waited itself. One that ended without it (refused, or cancelled
    before anything was run) had not, and those before it may publish still.
    """
    older_id = run.batch.predecessor
    while older_id is not None:
        run.check()
        older = run.aws.run(run.deployment.table.get_batch(older_id))
        if older is not None and not older.is_terminal:
            waited_seconds = run.now() - (run.batch.winds_up_since or 0)
            raise ComeBack(min(_MAX_WAIT_SECONDS, max(_MIN_WAIT_SECONDS, waited_seconds / 8)))
        older_id = older.predecessor if older is not None and older.final is None else None


def _record_file(run: Run, kind: Kind, num_bytes: int, version_id: str | None) -> None:
    key = kind.key_of(run.batch)
    created_at = run.batch.winds_up_since or run.batch.created_at
    file = File(
        id=kind.file_id_of(run.batch),
        tenant=run.batch.tenant,
        key=key,
        num_bytes=num_bytes,
        created_at=created_at,
        filename=key.rpartition("/")[2],
        purpose="batch_output",
        version_id=version_id,
        expires=_file_expires(run.batch, created_at),
    )
    run.aws.run(run.deployment.files.put_file(file))


def _file_expires(batch: Batch, created_at: int) -> int | None:
    """Return when a result is forgotten: with its batch, or before that where it was asked for."""
    asked = batch.options.output_expires_seconds
    ends = [created_at + asked if asked is not None else None, batch.expires]
    return min((at for at in ends if at is not None), default=None)


def _remove_stale(run: Run, kind: Kind) -> None:
    bucket, key = run.deployment.bucket, kind.key_of(run.batch)
    if found := run.aws.run(bucket.head(key)):
        run.keep_turn()
        run.aws.run(bucket.delete_found(key, found))


def _make_object(run: Run, kind: Kind, segments: SealedSegments) -> Mapping[str, Any]:
    """Make the object unless it is made, and return what S3 tells of it."""
    key, num_bytes = kind.key_of(run.batch), segments.num_bytes
    if found := _find_made(run, key, num_bytes):
        return found
    bucket, prefix = run.deployment.bucket, joined_prefix(run.batch.id, kind.segments)
    joined = join_groups(run.aws, bucket, segments, prefix, run.check)
    upload = Joining(key, _begin(run, kind), joined)
    try:
        etags = send_missing(run.aws, bucket, upload, run.check)
        run.keep_turn()
        run.aws.run(bucket.complete_upload(key, upload.id, etags))
    except NotThere as exc:
        if found := _find_made(run, key, num_bytes):
            return found
        if exc.aws_code != _GONE:
            raise
        _begin_anew(run, kind, upload, exc)
    found = _find_made(run, key, num_bytes)
    if found is None:
        raise HandlerError(f"{key} is not what was uploaded")
    logger.info("published", batch_id=run.batch.id, key=key, num_bytes=num_bytes)
    return found


def _find_made(run: Run, key: str, num_bytes: int) -> Mapping[str, Any] | None:
    """Return what S3 tells of the batch's object, None where another or none is there."""
    found = run.aws.run(run.deployment.bucket.head(key))
    if found is None or found["ContentLength"] != num_bytes:
        return None
    return found if found["Metadata"].get(BATCH_ID) == run.batch.id else None


def _begin(run: Run, kind: Kind) -> str:
    """Return the id of the batch's upload; of two that begin one the second gives its own up."""
    if known := kind.field(run.batch, "joining"):
        return str(known)
    bucket, key = run.deployment.bucket, kind.key_of(run.batch)
    is_short_lived = run.batch.options.output_expires_seconds is not None
    metadata = {BATCH_ID: run.batch.id}
    mine = run.aws.run(bucket.create_upload(key, metadata, is_short_lived=is_short_lived))
    chosen = run.aws.run(run.deployment.table.set_once(run.batch.id, f"{kind.name}_joining", mine))
    if chosen != mine:
        run.aws.run(bucket.abort_upload(key, mine))
    return str(chosen)


def _begin_anew(run: Run, kind: Kind, upload: Joining, cause: NotThere) -> NoReturn:
    """Forget an upload that somebody has aborted, a lifecycle rule for instance."""
    logger.warning("upload gone", batch_id=run.batch.id, key=upload.key, reason=str(cause))
    run.keep_turn()
    run.change(**kind.fields(joining=None))
    raise ComeBack(_MIN_WAIT_SECONDS) from cause
