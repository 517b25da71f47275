"""Merges a retry: writes the results of the retried batch again, with the retried rows in place.

The new objects are complete before one write switches the batch's counts and file IDs to them, so
no finished row is lost, and a run that dies leaves nothing that counts. The earlier files keep
their IDs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final

from tidemill.batch.file.decided_row import has_escalation_error
from tidemill.batch.file.formats import stream_of
from tidemill.batch.file.lines import FormatError, read_lines
from tidemill.batch.file.row_order import rows_of_lines
from tidemill.batch.file.rows import is_success
from tidemill.batch.merged_rows import merged_indexes, merged_key
from tidemill.batch.model import Batch, BatchError, Source
from tidemill.batch.object_keys import moved_outputs, result_file_id
from tidemill.batch.result_kinds import ERRORS, KINDS, OUTPUT, ResultKind
from tidemill.batch.retry import have_only_requests, merged_counts
from tidemill.batch.table.errors import RecipeError, TableError

from ..aws.items import dump
from ..errors import NotThere, ObjectChanged
from ..inputs.request_lines import requests_of, retried_batch
from ..inputs.row_sources import open_rows, row_sources
from ..lifecycle.batch_lock import BatchLock, Requeue
from ..observability import logger
from .result_files import BATCH_ID, find_made, record_file
from .upload_results import TableNotMade, count_try, dump_questions, upload_object

_WAIT_SECONDS: Final = 5.0
# Rows of larger batches cannot be listed after a merge: only their files contain them.
_MAX_INDEXED: Final = 2_000_000
_NUM_PUT_AT_ONCE: Final = 32
_CODE: Final = "merge_failed"


def merge_retry(lock: BatchLock) -> None:
    """Merge the rows of a retry into the results of the retried batch.

    If that is not possible, the errors of the retry contain the reason. Raises Requeue, LockLost.
    """
    batch = lock.batch
    try:
        old = retried_batch(lock.aws, lock.deployment, batch)
        other = BatchLock(lock.aws, lock.deployment, old, lock.time_left, lock.now)
        if not other.acquire():
            raise Requeue(_WAIT_SECONDS)
        try:
            count_try(lock)
            _merge(lock, other)
        finally:
            other.release()
    except (NotThere, ObjectChanged) as exc:
        _give_up(lock, f"its input or its rows no longer exist ({exc})")
    except (TableNotMade, FormatError, RecipeError, TableError) as exc:
        _give_up(lock, str(exc).rstrip("."))
    else:
        lock.change(merge="done")
        logger.info("retry merged", batch_id=batch.id, retried=old.id)


def _merge(lock: BatchLock, other: BatchLock) -> None:
    aws, deployment, old = lock.aws, lock.deployment, other.batch

    def look() -> None:
        lock.check_deadline()
        other.check_deadline()

    runs = [aws.run(row_sources(deployment, each)) for each in (lock.batch, old)]
    rows_of: dict[ResultKind, _Indexed] = {}
    changes: dict[str, object] = {}
    merged: list[Source] = []
    for kind in KINDS:
        rows = rows_of[kind] = _Indexed(_merged_rows(lock, old, runs, kind, look))
        first = next(filter(None, rows), None)
        file_id = None
        if first is not None:
            key = _own_key(lock, old, kind.key_of)
            found = upload_object(lock, old, key, chain([first], rows))
            file_id = result_file_id(lock.batch.id, f"{kind.name} of {old.id}")
            record_file(other, file_id, key, found)
            merged.append(_source_of(deployment.bucket.name, key, found))
        changes |= kind.fields(file_id=file_id)
    output, errors = (rows_of[kind] for kind in (OUTPUT, ERRORS))
    made = merged_counts(old, output.num_rows, errors.num_rows, output.num_escalation_failed)
    changes |= made | {"final": dump(made["final"])}
    changes |= _table_changes(lock, other, merged, look)
    file_ids: dict[str, Any] = {name: changes[name] for name in ("output_file_id", "error_file_id")}
    _put_indexes(lock, replace(old, **file_ids), rows_of, look)
    other.renew()
    other.change(**changes)
    _remove_stale(lock, old, changes)


class _Indexed:
    """Iterates rows, counts them, and notes the line and the size of each.

    Those that the second model of a cascade has failed are counted, too.
    """

    def __init__(self, rows: Iterator[tuple[int, bytes]]) -> None:
        self._rows = rows
        self.num_rows = self.num_escalation_failed = 0
        self.lines, self.sizes = array("q"), array("q")

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        line, row = next(self._rows)
        self.num_rows += bool(row)
        self.num_escalation_failed += has_escalation_error(row)
        if row and self.num_rows <= _MAX_INDEXED:
            self.lines.append(line)
            self.sizes.append(len(row))
        return row


def _put_indexes(
    lock: BatchLock,
    old: Batch,
    rows_of: Mapping[ResultKind, _Indexed],
    look: Callable[[], None],
) -> None:
    """Write where the rows of each shard are in the files of the retried batch."""
    if any(rows.num_rows > _MAX_INDEXED for rows in rows_of.values()):
        return
    aws, deployment = lock.aws, lock.deployment
    shards = aws.run(deployment.table.list_shards(old.id))
    places = {kind: (rows.lines, rows.sizes) for kind, rows in rows_of.items()}
    indexes = merged_indexes(shards, places)
    while some := [*islice(indexes, _NUM_PUT_AT_ONCE)]:
        look()
        aws.run_all(
            deployment.bucket.put(merged_key(old, number), data, "application/json")
            for number, data in some
        )


def _merged_rows(
    lock: BatchLock,
    old: Batch,
    runs: Sequence[Sequence[Source]],
    kind: ResultKind,
    look: Callable[[], None],
) -> Iterator[tuple[int, bytes]]:
    """Yield each line of the retried batch with its newest row, which is empty for another kind."""
    with ExitStack() as stack:
        lines = read_lines(stream_of(requests_of(lock.aws, lock.deployment, old)))
        files = [open_rows(lock.aws, stack, run, look) for run in runs]
        for raw, row in rows_of_lines(lines, files, are_requests=have_only_requests(old)):
            look()
            is_own = row is not None and is_success(row) == (kind is OUTPUT)
            yield raw.number, row if row and is_own else b""


def _own_key(lock: BatchLock, old: Batch, key_of: Callable[[Batch], str]) -> str:
    """Return the key of a result, or another one if a newer upload's result has that key."""
    key = key_of(old)
    found = lock.aws.run(lock.deployment.bucket.head(key))
    if found is None or found["Metadata"].get(BATCH_ID) == old.id:
        return key
    return key_of(replace(old, outputs=moved_outputs(old.outputs, old.tenant, old.id)))


def _table_changes(
    lock: BatchLock, other: BatchLock, rows: Sequence[Source], look: Callable[[], None]
) -> dict[str, object]:
    """Write the table of the retried batch again, if it has one; return the changes for it."""
    old = other.batch
    if old.outputs.table_key is None or old.table_file_id is None:
        return {}
    from .table_bytes import table_bytes  # late: not every Lambda has the libraries for tables

    key = _own_key(lock, old, lambda batch: batch.outputs.table_key or "")
    questions: list[Mapping[str, Any]] = []
    pieces = table_bytes(lock.aws, lock.deployment, old, rows, note=questions.append, look=look)
    found = upload_object(lock, old, key, pieces)
    file_id = result_file_id(lock.batch.id, f"table of {old.id}")
    record_file(other, file_id, key, found)
    changes: dict[str, object] = {"table_file_id": file_id}
    return changes | ({"questions": dump_questions(questions)} if questions else {})


def _source_of(bucket: str, key: str, found: Mapping[str, Any]) -> Source:
    return Source(bucket, key, found["ETag"], found["ContentLength"], found.get("VersionId"))


def _remove_stale(lock: BatchLock, old: Batch, changes: Mapping[str, object]) -> None:
    """Delete the object of a kind that has no rows any more; earlier versions are kept."""
    bucket = lock.deployment.bucket
    for kind in KINDS:
        key = kind.key_of(old)
        has_rows = changes[f"{kind.name}_file_id"] is not None
        found = None if has_rows else find_made(lock, key, owner=old)
        if found is not None:
            lock.aws.run(bucket.delete_found(key, found))


def _give_up(lock: BatchLock, reason: str) -> None:
    batch = lock.batch
    assert batch.retry is not None
    message = f"The rows could not be merged into those of {batch.retry.of}: {reason}."
    logger.error("retry not merged", batch_id=batch.id, reason=reason)
    errors = (*batch.errors, BatchError(_CODE, message))
    lock.change(merge="failed", errors=[dump(each) for each in errors])
