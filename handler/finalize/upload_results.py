"""Upload of a result that one run writes, such as a table, and the number of such runs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch
from tidemill.batch.parts import MAX_PARTS, MIN_COPIED_BYTES

from ..aws.objects.upload_plan import cut_into_parts
from ..errors import NotThere
from ..lifecycle.batch_lock import BatchLock
from .result_files import BATCH_ID, find_made

# Number of runs that may die (for example for lack of memory) or reach their deadline.
MAX_TRIES = 3
_PART_BYTES = 4 * MIN_COPIED_BYTES


class TableNotMade(HandlerError):
    """A table that cannot be written: its batch ends with the rows only."""

    code = "table_not_made"


def count_try(lock: BatchLock) -> None:
    """Count a run that writes results; raises TableNotMade if there have been too many."""
    if lock.batch.table_tries == MAX_TRIES:
        raise TableNotMade("no run finished it")
    lock.change(table_tries=lock.batch.table_tries + 1)


def dump_questions(questions: Sequence[Mapping[str, Any]]) -> str:
    """Return the distributions of a table's answers as JSON."""
    return json.dumps(questions, separators=(",", ":"))


def upload_object(
    lock: BatchLock,
    owner: Batch,
    key: str,
    pieces: Iterable[bytes],
    before_it_exists: Callable[[], None] = lambda: None,
) -> Mapping[str, Any]:
    """Upload an object of a batch and return its S3 metadata; an unfinished upload is aborted."""
    bucket, is_whole = lock.deployment.bucket, False
    is_short_lived = owner.options.output_expires_seconds is not None
    metadata = {BATCH_ID: owner.id}
    upload = lock.aws.run(bucket.create_upload(key, metadata, is_short_lived=is_short_lived))
    etags: dict[int, str] = {}
    try:
        for number, part in enumerate(cut_into_parts(pieces, _PART_BYTES), 1):
            if number > MAX_PARTS:
                raise TableNotMade(f"it is longer than {MAX_PARTS * _PART_BYTES:,} bytes")
            sent = bucket.upload_part(key, upload, number, io.BytesIO(part))
            etags[number] = lock.aws.run(sent)
        lock.renew()
        before_it_exists()
        lock.aws.run(bucket.complete_upload(key, upload, etags))
        is_whole = True
    finally:
        if not is_whole:
            lock.aws.run(bucket.abort_upload(key, upload))
    found = find_made(lock, key, owner=owner)
    if found is None:
        raise NotThere(f"{key} is no longer the uploaded object")
    return found
