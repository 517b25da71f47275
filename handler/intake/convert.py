"""Converts an input to plain JSONL once, into the batch's work folder, where later runs read it.

It is a multipart upload, so that another run can resume it. Gzip cannot be read from the middle:
that run reads the input from its start again, but sends only the missing parts.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import Batch, Conversion, Source
from tidemill.batch.object_keys import converted_key
from tidemill.batch.parts import MAX_PARTS

from ..aws.items import dump
from ..aws.objects.upload_plan import cut_into_parts
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..lifecycle.batch_lock import RESERVE_SECONDS, BatchLock, Requeue
from ..observability import logger

PART_BYTES = 16 * 2**20

_NUM_THREADS = 2
# A run that makes no progress for this many seconds counts as vain. One may be due to a slow S3,
# but not `_MAX_VAIN` in a row.
_FAIR_SECONDS = 300
_MAX_VAIN = 3
_NO_UPLOAD = "NoSuchUpload"


def convert_to_jsonl(lock: BatchLock, conversion: Conversion) -> None:
    """Convert the input of a batch to JSONL and make that its source.

    Raises FormatError for a damaged or too long input, Requeue near the deadline, LockLost,
    ObjectChanged and NotThere. The upload stays, because the batch has not ended yet.
    """
    bucket, original, key = lock.deployment.bucket, lock.batch.source, converted_key(lock.batch.id)
    try:
        etags = _send(lock, conversion)
        lock.renew()
        lock.aws.run(bucket.complete_upload(key, conversion.upload, etags))
    except NotThere as exc:
        if exc.aws_code != _NO_UPLOAD:
            raise
        # An earlier run has completed it and died, or it was aborted from outside.
    found = lock.aws.run(bucket.head(key))
    if found is None:
        logger.warning("upload gone", batch_id=lock.batch.id, key=key)
        lock.renew()
        lock.change(conversion=None)
        raise Requeue
    plain = Source(bucket.name, key, found["ETag"], found["ContentLength"])
    lock.change(source=dump(plain), original=dump(original), failing_since=None)
    logger.info("made plain", batch_id=lock.batch.id, key=original.key, num_bytes=plain.num_bytes)


def abort_conversion(aws: Aws, deployment: Deployment, batch: Batch) -> None:
    """Abort the upload of a batch that ended before its file was converted to JSONL.

    It is not aborted earlier: another run would report a missing upload, not the file's error.
    """
    if batch.conversion is not None and batch.original is None:
        aws.run(deployment.bucket.abort_upload(converted_key(batch.id), batch.conversion.upload))


def _send(lock: BatchLock, conversion: Conversion) -> dict[int, str]:
    """Send the missing parts and return the ETags of all parts."""
    bucket, key, upload_id = lock.deployment.bucket, converted_key(lock.batch.id), conversion.upload
    there = lock.aws.run(bucket.list_uploaded(key, upload_id))
    has_time = lock.time_left() > _FAIR_SECONDS
    etags: dict[int, str] = {}
    pending: deque[tuple[int, Future[str]]] = deque()

    def send(number: int, part: bytes) -> str:
        return lock.aws.run(bucket.upload_part(key, upload_id, number, io.BytesIO(part)))

    def collect(limit: int) -> None:
        while len(pending) > limit:
            number, sent = pending.popleft()
            etags[number] = sent.result()
            if lock.batch.failing_since is not None:
                lock.change(failing_since=None)

    with closing(_requests(lock, conversion)) as lines, ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            cut = cut_into_parts(_renewing(lock, lines), PART_BYTES)
            for number, part in enumerate((part or b"\n" for part in cut), 1):
                _check(lock)
                etag, num_bytes = there.get(number, ("", -1))
                if num_bytes == len(part):
                    etags[number] = etag
                elif number > MAX_PARTS:
                    raise _too_long()
                else:
                    pending.append((number, pool.submit(send, number, part)))
                    collect(_NUM_THREADS - 1)
        except Requeue:
            collect(0)
            has_come_further = bool(etags.keys() - there.keys())
            if has_time or has_come_further:
                _record_attempt(
                    lock, conversion, 0 if has_come_further else conversion.num_vain + 1
                )
            raise
        collect(0)
    return etags


def _requests(lock: BatchLock, conversion: Conversion) -> Generator[bytes]:
    from ..inputs.request_lines import requests_of  # late: most files need no conversion

    yield from requests_of(lock.aws, lock.deployment, replace(lock.batch, conversion=conversion))


def _renewing(lock: BatchLock, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the non-empty pieces: a part may need very many empty ones."""
    for piece in pieces:
        if piece:
            yield piece
        else:
            _check(lock)


def _check(lock: BatchLock) -> None:
    """Renew the lock; raises Requeue near the deadline, LockLost."""
    lock.check_active()
    if lock.time_left() < RESERVE_SECONDS:
        raise Requeue


def _record_attempt(lock: BatchLock, conversion: Conversion, num_vain: int) -> None:
    """Record the number of runs without progress; raises FormatError if there are too many."""
    lock.renew()
    if num_vain == _MAX_VAIN:
        raise _too_long()
    if num_vain != conversion.num_vain:
        lock.change(conversion=dump(replace(conversion, num_vain=num_vain)))


def _too_long() -> FormatError:
    return FormatError(
        "The file is too large to be decompressed here: split it, or upload it as plain JSONL."
    )
