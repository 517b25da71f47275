"""The end of a batch: its rows in the order of their lines become the files that clients fetch."""

from __future__ import annotations

from itertools import islice

from handler.batch.kinds import ERRORS, KINDS, Kind
from handler.batch.model import Batch, File, Progress
from handler.batch.not_run import EXPIRED, row_not_run
from handler.batch.states import Status
from server.local.answering import opened, unanswered
from server.local.folder import sync_folder
from server.local.rows import Rows
from server.local.store import Store

_FILLED_AT_ONCE = 1000


def fill(store: Store, batch: Batch) -> None:
    """Give each line that was not run in time the row that says so; repeated it goes on."""
    rows = store.rows_of(batch.id)
    rows.open()
    with opened(store.input_of(batch.id)) as file:
        lines = unanswered(file, rows)
        while some := list(islice(lines, _FILLED_AT_ONCE)):
            filled = [row_not_run(raw, EXPIRED) for raw in some]
            num_failures = sum(is_failure for _, is_failure in filled)
            rows.append([row for row, _ in filled], Progress(failed=num_failures))


def publish(store: Store, batch: Batch, status: Status, now: float, **changes: object) -> Batch:
    """Make the files of a batch, end it in this status, and drop its work; may be repeated.

    Raises OSError, sqlite3.Error, and RowsGone for rows that are no longer there.
    """
    rows = store.rows_of(batch.id)
    made = {kind: file for kind in KINDS if (file := _made(store, batch, kind, rows)) is not None}
    sync_folder(store.folder.files)
    kept = store.batches.get(batch.id)
    assert kept is not None, batch.id
    ids = {f"{kind.name}_file_id": file.id for kind, file in made.items()}
    with store.database.writing() as connection:
        for file in made.values():
            store.files.put_by(connection, file)
        ended = store.batches.move_by(
            connection, batch.id, status, now, final=kept.progress.at_rest, **ids, **changes
        )
        rows.publish_by(connection)
    store.drop_work(batch.id)
    return ended


def _made(store: Store, batch: Batch, kind: Kind, rows: Rows) -> File | None:
    """Return the file of one kind, with its bytes in their place; None where it would be empty."""
    file_id = kind.file_id_of(batch)
    path, whole = store.folder.work_of(batch.id) / kind.name, store.folder.file(file_id)
    path.parent.mkdir(exist_ok=True)
    num_bytes = rows.copy(path, successes=kind is not ERRORS)
    if not num_bytes:
        return None
    path.rename(whole)
    created_at = batch.winds_up_since or batch.created_at
    seconds = batch.options.output_expires_seconds
    return File(
        id=file_id,
        tenant=batch.tenant,
        key=file_id,
        num_bytes=num_bytes,
        created_at=created_at,
        filename=kind.key_of(batch).rpartition("/")[2],
        purpose="batch_output",
        expires=None if seconds is None else created_at + seconds,
    )
