"""Table of a batch: its published rows next to the columns of its input, written in one run.

The libraries that write tables are in the intake Lambda only, which a message starts; when it is
done, finalize continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tidemill.batch.file.lines import FormatError
from tidemill.batch.model import BatchError
from tidemill.batch.object_keys import result_file_id
from tidemill.batch.table.errors import RecipeError, TableError

from ..aws.items import dump
from ..aws.queues import advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere, ObjectChanged
from ..inputs.row_sources import row_sources
from ..lifecycle.batch_lock import BatchLock, LockLost, Requeue
from ..observability import logger
from .merge import merge_retry
from .result_files import find_made, record_file
from .upload_results import TableNotMade, count_try, dump_questions, upload_object


def make_table(
    aws: Aws,
    deployment: Deployment,
    batch_id: str,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Write the table of a batch or merge a retry if that is due, and send the next message.

    If the table cannot be written, the batch's errors contain the reason. Idempotent.
    """
    batch = aws.run(deployment.table.get_batch(batch_id))
    if batch is None or not (batch.is_table_due or batch.is_merge_due):
        return
    lock = BatchLock(aws, deployment, batch, time_left, now)
    if not lock.acquire():
        logger.info("another run has the batch", batch_id=batch.id)
        return
    delay_seconds = 0.0
    try:
        if lock.batch.is_table_due:
            _make(lock)
        elif lock.batch.is_merge_due:
            merge_retry(lock)
    except Requeue as exc:
        delay_seconds = exc.delay_seconds
        logger.warning("results not written in time", batch_id=batch.id)
    except LockLost as exc:
        logger.info("another run has the batch now", batch_id=batch.id, reason=str(exc))
    finally:
        lock.release()
    message = advance_message(batch.id)
    aws.run(deployment.control.send(message, group=batch.tenant, delay_seconds=delay_seconds))


def _make(lock: BatchLock) -> None:
    key = lock.batch.outputs.table_key
    assert key is not None
    try:
        found = find_made(lock, key) or _upload(lock, key)
    except (NotThere, ObjectChanged) as exc:
        _give_up(lock, f"the input or its rows no longer exist ({exc})")
    except (TableNotMade, TableError, RecipeError, FormatError) as exc:
        _give_up(lock, str(exc).rstrip("."))
    else:
        file_id = result_file_id(lock.batch.id, "table")
        record_file(lock, file_id, key, found)
        lock.change(table_file_id=file_id)
        num_bytes = found["ContentLength"]
        logger.info("table made", batch_id=lock.batch.id, key=key, num_bytes=num_bytes)


def _upload(lock: BatchLock, key: str) -> Mapping[str, Any]:
    """Upload the table and return its S3 metadata."""
    from .table_bytes import table_bytes  # late: not every Lambda has the libraries for tables

    count_try(lock)
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    questions: list[Mapping[str, Any]] = []
    sources = aws.run(row_sources(deployment, batch))
    pieces = table_bytes(
        aws, deployment, batch, sources, note=questions.append, look=lock.check_deadline
    )

    def note_questions() -> None:
        if questions:  # before the table exists, because a run that finds it does not count again
            lock.change(questions=dump_questions(questions))

    return upload_object(lock, batch, key, pieces, note_questions)


def _give_up(lock: BatchLock, reason: str) -> None:
    """End the batch without a table."""
    batch = lock.batch
    message = (
        f"The table could not be written: {reason}. Its rows are in {batch.outputs.output_key}."
    )
    error = BatchError(TableNotMade.code, message)
    logger.error("table not written", batch_id=batch.id, reason=reason)
    outputs = dump(batch.outputs) | {"table_key": None}
    lock.change(outputs=outputs, errors=[dump(each) for each in (*batch.errors, error)])
