"""Table of batches: each as a JSON document, with the sums of its finished rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from tidemill.batch.model import Batch
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status

from .database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    document TEXT NOT NULL,
    progress TEXT NOT NULL,
    rows_end INTEGER NOT NULL DEFAULT 0
)
"""
_BATCH = TypeAdapter(Batch)
_PROGRESS = TypeAdapter(Progress)
OPEN = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
_BY_ID = "SELECT place, document, progress, rows_end FROM batches WHERE id = ?"
_OLDER: Final = (
    "SELECT place, document, progress, rows_end FROM batches WHERE place < ?1"
    " AND (?2 IS NULL OR json_extract(document, '$.endpoint') = ?2) ORDER BY place DESC LIMIT ?3"
)
_MERGED_RETRIES: Final = (
    "SELECT id FROM batches WHERE json_extract(document, '$.retry.of') = ?"
    " AND json_extract(document, '$.merge') = 'done'"
)
_NEWER: Final = _OLDER.replace("place < ", "place > ").replace("DESC", "ASC")


class StoredBatch(NamedTuple):
    """A batch as stored: its number, the sums of its rows, and the end of their bytes."""

    place: int
    batch: Batch
    progress: Progress
    rows_end: int


class BatchTable:
    """Batches by id, listed newest first; only `move` changes a status."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, batch: Batch) -> Batch:
        """Insert a batch and return it, or return the existing one of the same id."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO batches (id, status, document, progress) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (id) DO NOTHING",
                (batch.id, batch.status, _text(batch), _PROGRESS.dump_json(Progress()).decode()),
            )
            return _found(connection, batch.id).batch

    def get(self, batch_id: str) -> StoredBatch | None:
        """Return a batch, None where there is none."""
        rows = self._database.read(_BY_ID, batch_id)
        return _stored(rows[0]) if rows else None

    def list(
        self,
        *,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        endpoint: str | None = None,
    ) -> tuple[Sequence[StoredBatch], bool]:
        """Return batches after `after`, or those right before `before`; newest first.

        Only those of an `endpoint`, if one is given. The second value says whether there are more
        in that direction. Raises KeyError if the batch of the ID does not exist.
        """
        place, is_older = 2**62, before is None
        if (known := after if is_older else before) is not None:
            stored = self.get(known)
            if stored is None:
                raise KeyError(known)
            place = stored.place
        rows = self._database.read(_OLDER if is_older else _NEWER, place, endpoint, limit + 1)
        page = [_stored(row) for row in rows[:limit]]
        return page if is_older else page[::-1], len(rows) > limit

    def open_ids(self) -> Sequence[str]:
        """Return the ids of batches that are not terminal, oldest first."""
        query = "SELECT id FROM batches WHERE status IN (?, ?, ?, ?) ORDER BY place"
        return [batch_id for (batch_id,) in self._database.read(query, *OPEN)]

    def merged_retries(self, batch_id: str) -> Sequence[str]:
        """Return the IDs of the retries whose rows were merged into a batch."""
        return [retry_id for (retry_id,) in self._database.read(_MERGED_RETRIES, batch_id)]

    def move(self, batch_id: str, status: Status, now: float, **changes: Any) -> Batch:
        """Move a batch to another status, with changes; raises InvalidMove."""
        with self._database.writing() as connection:
            return self.move_by(connection, batch_id, status, now, **changes)

    def move_by(
        self,
        connection: sqlite3.Connection,
        batch_id: str,
        status: Status,
        now: float,
        **changes: Any,
    ) -> Batch:
        """Move a batch within a transaction."""
        moved = replace(_found(connection, batch_id).batch.moved(status, int(now)), **changes)
        connection.execute(
            "UPDATE batches SET status = ?, document = ? WHERE id = ?",
            (moved.status, _text(moved), batch_id),
        )
        return moved

    def change(self, batch_id: str, **changes: Any) -> None:
        """Change fields of a batch, except its status."""
        with self._database.writing() as connection:
            self.change_by(connection, batch_id, **changes)

    def change_by(self, connection: sqlite3.Connection, batch_id: str, **changes: Any) -> None:
        """Change fields of a batch within a transaction."""
        changed = replace(_found(connection, batch_id).batch, **changes)
        query = "UPDATE batches SET document = ? WHERE id = ?"
        connection.execute(query, (_text(changed), batch_id))

    def add_progress(
        self, connection: sqlite3.Connection, batch_id: str, gained: Progress, rows_end: int
    ) -> None:
        """Add the sums of rows that become durable in the same transaction."""
        total = _found(connection, batch_id).progress + gained
        connection.execute(
            "UPDATE batches SET progress = ?, rows_end = ? WHERE id = ?",
            (_PROGRESS.dump_json(total).decode(), rows_end, batch_id),
        )


def _found(connection: sqlite3.Connection, batch_id: str) -> StoredBatch:
    return _stored(connection.execute(_BY_ID, (batch_id,)).fetchone())


def _stored(row: Any) -> StoredBatch:
    place, document, progress, rows_end = row
    return StoredBatch(
        place, _BATCH.validate_json(document), _PROGRESS.validate_json(progress), rows_end
    )


def _text(batch: Batch) -> str:
    return _BATCH.dump_json(batch).decode()
