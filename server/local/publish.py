"""Publishing a batch: its rows, in line order, become the output and error files."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from threading import Lock

from tidemill.batch.model import Batch
from tidemill.batch.parts import EXPIRED, row_not_run
from tidemill.batch.progress_counts import Progress
from tidemill.batch.result_kinds import ERRORS, KINDS, ResultKind
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File

from .batch_run import lines_without_row
from .folder import sync_folder
from .retry import merge_retry, result_file
from .rows import Rows
from .store import Store

_FILLED_AT_ONCE = 1000
_merging = Lock()


def fill_expired(store: Store, batch: Batch) -> None:
    """Write the `expired` row of each line that did not run in time; may be repeated."""
    rows = store.rows_of(batch.id)
    rows.open()
    echo = store.echoed_fields(batch)
    with store.input_path(batch.id).open("rb") as file:
        lines = lines_without_row(file, rows, batch.endpoint)
        while some := list(islice(lines, _FILLED_AT_ONCE)):
            filled = [row_not_run(raw, EXPIRED) for raw in some]
            num_failures = sum(is_failure for _, is_failure in filled)
            finished = [row for row, _ in filled]
            if echo is not None:
                pairs = zip(finished, some, strict=True)
                finished = [row._replace(row=echo.add_to(row.row, raw)) for row, raw in pairs]
            rows.append(finished, Progress(failed=num_failures))


def publish(store: Store, batch: Batch, status: Status, now: float, **changes: object) -> Batch:
    """Create the result files of a batch, end it in this status, delete its work; repeatable.

    Raises OSError, sqlite3.Error, and RowsGone for missing rows.
    """
    # Two retries of a batch must not merge their rows into the same files.
    with _merging if batch.retry is not None else nullcontext():
        return _publish(store, batch, status, now, **changes)


def _publish(store: Store, batch: Batch, status: Status, now: float, **changes: object) -> Batch:
    rows = store.rows_of(batch.id)
    made = {
        kind: file for kind in KINDS if (file := _make_file(store, batch, kind, rows)) is not None
    }
    merged = None
    if batch.retry is not None and made:
        merged = merge_retry(store, batch, made)
        changes |= {"merge": "failed" if merged is None else "done"}
    sync_folder(store.folder.files)
    stored = store.batches.get(batch.id)
    assert stored is not None, batch.id
    ids = {f"{kind.name}_file_id": file.id for kind, file in made.items()}
    with store.database.writing() as connection:
        for file in (*made.values(), *(merged.files if merged else ())):
            store.files.put_by(connection, file)
        if merged is not None:
            store.batches.change_by(connection, merged.batch_id, **merged.changes)
            merged.places.publish_by(connection)
        ended = store.batches.move_by(
            connection, batch.id, status, now, final=stored.progress.without_rates, **ids, **changes
        )
        rows.publish_by(connection)
    store.delete_work(batch.id)
    return ended


def _make_file(store: Store, batch: Batch, kind: ResultKind, rows: Rows) -> File | None:
    """Write the result file of one kind and return it; None when it would be empty."""
    file_id = kind.file_id_of(batch)
    path, whole = store.folder.work_path(batch.id) / kind.name, store.folder.file(file_id)
    path.parent.mkdir(exist_ok=True)
    num_bytes = rows.copy(path, successes=kind is not ERRORS)
    if not num_bytes:
        return None
    path.rename(whole)
    return result_file(batch, kind, file_id, num_bytes)
