"""The table of batches: each as a document, with what its rows came to so far."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from handler.batch.model import Batch, Progress
from handler.batch.states import Status
from server.local.database import Database

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


class Kept(NamedTuple):
    """A batch as it is kept: its number among all, its rows' sums, and where their bytes end."""

    place: int
    batch: Batch
    progress: Progress
    rows_end: int


class BatchTable:
    """Batches by id and the newest first; a status moves by `move` alone."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, batch: Batch) -> Batch:
        """Record a batch, and return it, or the one of the same id that is there."""
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO batches (id, status, document, progress) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (id) DO NOTHING",
                (batch.id, batch.status, _text(batch), _PROGRESS.dump_json(Progress()).decode()),
            )
            return _found(connection, batch.id).batch

    def get(self, batch_id: str) -> Kept | None:
        """Return a batch, None where there is none."""
        found = self._database.read(_BY_ID, batch_id)
        return _kept(found[0]) if found else None

    def list(self, *, limit: int, after: str | None = None) -> tuple[Sequence[Kept], bool]:
        """Return some batches behind `after`, the newest first, and whether there are more.

        Raises KeyError for one to begin behind that is not there.
        """
        place = 2**62
        if after is not None:
            kept = self.get(after)
            if kept is None:
                raise KeyError(after)
            place = kept.place
        found = self._database.read(
            "SELECT place, document, progress, rows_end FROM batches WHERE place < ?"
            " ORDER BY place DESC LIMIT ?",
            place,
            limit + 1,
        )
        return [_kept(row) for row in found[:limit]], len(found) > limit

    def open_ids(self) -> Sequence[str]:
        """Return the ids of those that have not ended, the oldest first."""
        query = "SELECT id FROM batches WHERE status IN (?, ?, ?, ?) ORDER BY place"
        return [batch_id for (batch_id,) in self._database.read(query, *OPEN)]

    def move(self, batch_id: str, status: Status, now: float, **changes: Any) -> Batch:
        """Bring a batch to another status, with changes; raises InvalidMove when it cannot be."""
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
        """Do the same among other writes."""
        moved = replace(_found(connection, batch_id).batch.moved(status, int(now)), **changes)
        connection.execute(
            "UPDATE batches SET status = ?, document = ? WHERE id = ?",
            (moved.status, _text(moved), batch_id),
        )
        return moved

    def add_progress(
        self, connection: sqlite3.Connection, batch_id: str, gained: Progress, rows_end: int
    ) -> None:
        """Add what rows came to that are durable with the same write."""
        total = _found(connection, batch_id).progress + gained
        connection.execute(
            "UPDATE batches SET progress = ?, rows_end = ? WHERE id = ?",
            (_PROGRESS.dump_json(total).decode(), rows_end, batch_id),
        )


def _found(connection: sqlite3.Connection, batch_id: str) -> Kept:
    return _kept(connection.execute(_BY_ID, (batch_id,)).fetchone())


def _kept(row: Any) -> Kept:
    place, document, progress, rows_end = row
    return Kept(place, _BATCH.validate_json(document), _PROGRESS.validate_json(progress), rows_end)


def _text(batch: Batch) -> str:
    return _BATCH.dump_json(batch).decode()
