"""Table of a batch: its published rows next to the columns of its input, written in one run.

The libraries that write tables are in the intake Lambda only, which a message starts; when it is
done, finalize continues.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.batch.errors import HandlerError
from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import BatchError
from tidemill.batch.object_keys import result_file_id
from tidemill.batch.parts import MAX_PARTS, MIN_COPIED_BYTES
from tidemill.batch.table.errors import RecipeError, TableError

from ..aws.items import dump
from ..aws.objects.upload_plan import cut_into_parts
from ..aws.queues import advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere, ObjectChanged
from ..lifecycle.batch_lock import BatchLock, LockLost, Requeue
from ..observability import logger
from .result_files import BATCH_ID, find_made, record_file

# Number of runs that may die (for example for lack of memory) or reach their deadline.
MAX_TRIES = 3
_PART_BYTES = 4 * MIN_COPIED_BYTES


class TableNotMade(HandlerError):
    """A table that cannot be written: its batch ends with the rows only."""

    code = "table_not_made"


def make_table(
    aws: Aws,
    deployment: Deployment,
    batch_id: str,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Write the table of a batch if it is due, and send the message for the next step.

    If the table cannot be written, the batch's errors contain the reason. Idempotent.
    """
    batch = aws.run(deployment.table.get_batch(batch_id))
    if batch is None or not batch.is_table_due:
        return
    lock = BatchLock(aws, deployment, batch, time_left, now)
    if not lock.acquire():
        logger.info("another run has the batch", batch_id=batch.id)
        return
    try:
        if lock.batch.is_table_due:
            _make(lock)
    except Requeue:
        logger.warning("table not written in time", batch_id=batch.id)
    except LockLost as exc:
        logger.info("another run has the batch now", batch_id=batch.id, reason=str(exc))
    finally:
        lock.release()
    aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))


def _make(lock: BatchLock) -> None:
    is_table = lock.batch.outputs.table_key is not None
    key = lock.batch.outputs.table_key or lock.batch.outputs.merged_key
    name = "table" if is_table else "merged"
    assert key is not None
    try:
        found = find_made(lock, key) or _upload(lock, key)
    except (NotThere, ObjectChanged) as exc:
        _give_up(lock, f"the input or its rows no longer exist ({exc})")
    except (TableNotMade, TableError, RecipeError, FormatError) as exc:
        _give_up(lock, str(exc).rstrip("."))
    else:
        file_id = result_file_id(lock.batch.id, name)
        record_file(lock, file_id, key, found)
        lock.change(**{f"{name}_file_id": file_id})
        num_bytes = found["ContentLength"]
        logger.info(f"{name} made", batch_id=lock.batch.id, key=key, num_bytes=num_bytes)


def _upload(lock: BatchLock, key: str) -> Mapping[str, Any]:
    """Upload the table and return its S3 metadata; an unfinished upload is aborted."""
    from .table_bytes import merged_rows, table_bytes  # late: not every Lambda has the libraries

    if lock.batch.table_tries == MAX_TRIES:
        raise TableNotMade("no run finished it")
    lock.change(table_tries=lock.batch.table_tries + 1)
    bucket, is_whole = lock.deployment.bucket, False
    is_short_lived = lock.batch.options.output_expires_seconds is not None
    metadata = {BATCH_ID: lock.batch.id}
    upload = lock.aws.run(bucket.create_upload(key, metadata, is_short_lived=is_short_lived))
    etags: dict[int, str] = {}
    questions: list[Mapping[str, Any]] = []
    try:
        is_table = lock.batch.outputs.table_key is not None
        pieces = table_bytes(lock, questions.append) if is_table else merged_rows(lock)
        for number, part in enumerate(cut_into_parts(pieces, _PART_BYTES), 1):
            if number > MAX_PARTS:
                raise TableNotMade(f"it is longer than {MAX_PARTS * _PART_BYTES:,} bytes")
            sent = bucket.upload_part(key, upload, number, io.BytesIO(part))
            etags[number] = lock.aws.run(sent)
        lock.renew()
        if questions:  # before the table exists, because a run that finds it does not count again
            lock.change(questions=json.dumps(questions, separators=(",", ":")))
        lock.aws.run(bucket.complete_upload(key, upload, etags))
        is_whole = True
    finally:
        if not is_whole:
            lock.aws.run(bucket.abort_upload(key, upload))
    found = find_made(lock, key)
    if found is None:
        raise NotThere(f"{key} is no longer the uploaded object")
    return found


def _give_up(lock: BatchLock, reason: str) -> None:
    """End the batch without a table."""
    batch = lock.batch
    thing = "table" if batch.outputs.table_key else "file of merged rows"
    message = (
        f"The {thing} could not be written: {reason}. Its rows are in {batch.outputs.output_key}."
    )
    error = BatchError(TableNotMade.code, message)
    logger.error("table not written", batch_id=batch.id, reason=reason)
    outputs = dump(batch.outputs) | {"table_key": None, "merged_key": None}
    lock.change(outputs=outputs, errors=[dump(each) for each in (*batch.errors, error)])
