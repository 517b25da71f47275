"""Table of finished rows: their positions in each batch's file of rows.

Rows arrive in any order. A row is durable, and counts, once its position is in the table. Bytes
after the last position belong to an unfinished write and are cut off. When the batch has ended, the
table holds the positions in its output and error files.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.batch.file.rows import is_truncated
from tidemill.batch.parts import FinishedRow, RowKind
from tidemill.batch.progress_counts import Progress
from tidemill.protocol.contract import Usage

from .batches import BatchTable
from .database import Database
from .history import add_history_by

# `kind` is a number of RowKind.
SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (
    batch INTEGER NOT NULL,
    line INTEGER NOT NULL,
    start INTEGER NOT NULL,
    size INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID
"""
INDEXES = tuple(
    f"CREATE INDEX IF NOT EXISTS rows_of_kind_{kind:d} ON rows (batch, line) WHERE kind = {kind:d}"
    for kind in RowKind
    if kind
)
"""Indexes of the rows that are not whole answers: few of a large batch."""

UPGRADES = (
    "ALTER TABLE rows RENAME COLUMN is_success TO kind",
    "UPDATE rows SET kind = CASE kind WHEN 0 THEN 2 ELSE 3 END",
    # Positions of rows that were merged with those of a retry.
    (
        "DELETE FROM rows WHERE batch IN (SELECT old.place FROM batches AS old"
        " JOIN batches AS new ON json_extract(new.document, '$.retry.of') = old.id"
        " WHERE json_extract(new.document, '$.merge') = 'done')"
    ),
)
"""Statements for tables that knew only whether a row is a success."""

_PUBLISH = (
    "INSERT OR REPLACE INTO rows SELECT batch, line,"
    " SUM(size) OVER (PARTITION BY kind = 2 ORDER BY line) - size, size, kind"
    " FROM rows WHERE batch = ?"
)
_INSERT = "INSERT INTO rows VALUES (?, ?, ?, ?, ?)"
_PAGE = 4096
_COPIED_BYTES = 2**22


class RowsGone(Exception):
    """Finished rows are missing from the file they were written to."""


class Rows:
    """The finished rows of one batch, for a single writer."""

    def __init__(self, database: Database, batches: BatchTable, batch_id: str, path: Path) -> None:
        stored = batches.get(batch_id)
        assert stored is not None, batch_id
        self._database = database
        self._batches = batches
        self._batch_id = batch_id
        self._batch = stored.batch
        self._place = stored.place
        self._end = stored.rows_end
        self._path = path
        self._is_unsure = False  # whether the last write may have been committed

    def open(self) -> None:
        """Cut off bytes that were written but never recorded; raises RowsGone."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._end:
            raise RowsGone(
                f"The batch's file of finished rows must have {self._end:,} bytes and has {size:,}:"
                " the server's data folder was changed from outside."
            )
        if size > self._end:
            os.truncate(self._path, self._end)

    def append(
        self,
        rows: Sequence[FinishedRow],
        gained: Progress | None = None,
        *,
        times: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Make rows durable; `gained` overrides their progress, for rows that were not run.

        `times` are those at which the run's first row began and its last one ended.

        After an exception, call it again with the same rows: it skips those that were committed
        after all.
        """
        if self._is_unsure and not (rows := self._uncommitted(rows)):
            return
        self._is_unsure = True
        self.open()
        with self._path.open("ab") as file:
            for row in rows:
                file.write(row.row)
            file.flush()
            os.fdatasync(file.fileno())
        start, places = self._end, []
        for row in rows:
            kind = kind_of(row.row, is_success=row.is_success)
            places.append((self._place, row.line, start, len(row.row), kind))
            start += len(row.row)
        with self._database.writing() as connection:
            connection.executemany(_INSERT, places)
            progress = gained or _progress_of(rows, [kind for *_, kind in places])
            if gained is None:
                add_history_by(connection, self._batch, progress, time.time())
            progress = replace(progress, first_row_at=times[0], last_row_at=times[1])
            self._batches.add_progress(connection, self._batch_id, progress, start)
        self._end = start
        self._is_unsure = False

    def _uncommitted(self, rows: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Return the rows missing from the table, and reset the end of the file to the table's."""
        stored = self._batches.get(self._batch_id)
        assert stored is not None, self._batch_id
        self._end = stored.rows_end
        committed = {*self.lines()}
        return [row for row in rows if row.line not in committed]

    def lines(self) -> Iterator[int]:
        """Yield the numbers of the lines that have a row, in order."""
        last = 0
        query = "SELECT line FROM rows WHERE batch = ? AND line > ? ORDER BY line LIMIT ?"
        while found := self._database.read(query, self._place, last, _PAGE):
            for (last,) in found:
                yield last

    def copy(self, to: Path, *, successes: bool) -> int:
        """Write the rows of one kind to a file in line order; return the number of bytes.

        Raises RowsGone.
        """
        self.open()
        with to.open("wb") as copy:
            if self._end:
                with self._path.open("rb", buffering=0) as file:
                    for start, size in self._runs(successes=successes):
                        copy.write(read_row(file.fileno(), start, size))
            copy.flush()
            os.fsync(copy.fileno())
            return copy.tell()

    def _runs(self, *, successes: bool) -> Iterator[tuple[int, int]]:
        """Yield byte ranges `(start, size)`, adjacent rows merged."""
        last, run = 0, (0, 0)
        query = (
            "SELECT line, start, size FROM rows WHERE batch = ? AND line > ?"
            " AND (kind <> 2) = ? ORDER BY line LIMIT ?"
        )
        while found := self._database.read(query, self._place, last, successes, _PAGE):
            last = found[-1][0]
            for _, start, size in found:
                if start == sum(run) and run[1] + size <= _COPIED_BYTES:
                    run = (run[0], run[1] + size)
                    continue
                if run[1]:
                    yield run
                run = (start, size)
        if run[1]:
            yield run

    def publish_by(self, connection: sqlite3.Connection) -> None:
        """Record within a transaction the positions of rows in the files that `copy` made."""
        connection.execute(_PUBLISH, (self._place,))

    def delete(self) -> None:
        """Delete the positions from the table."""
        with self._database.writing() as connection:
            connection.execute("DELETE FROM rows WHERE batch = ?", (self._place,))


class MergedPlaces:
    """Positions of the rows of a batch in new files, staged until they replace the present ones.

    Only one retry of a batch may be merged at a time.
    """

    def __init__(self, database: Database, place: int) -> None:
        self._database = database
        self._place = place
        self._staged: list[tuple[int, int, int, int, RowKind]] = []
        self._ends = dict.fromkeys((False, True), 0)
        self.discard()

    def add(self, line: int, row: bytes, kind: RowKind) -> None:
        """Add the next row, which follows the one before in the file of its kind."""
        is_failed = kind is RowKind.FAILED
        self._staged.append((-self._place, line, self._ends[is_failed], len(row), kind))
        self._ends[is_failed] += len(row)
        if len(self._staged) == _PAGE:
            self._store()

    def publish_by(self, connection: sqlite3.Connection) -> None:
        """Replace the present positions within a transaction."""
        connection.executemany(_INSERT, self._staged)
        connection.execute("DELETE FROM rows WHERE batch = ?", (self._place,))
        connection.execute("UPDATE rows SET batch = -batch WHERE batch = ?", (-self._place,))

    def discard(self) -> None:
        """Delete what is staged."""
        self._staged.clear()
        with self._database.writing() as connection:
            connection.execute("DELETE FROM rows WHERE batch = ?", (-self._place,))

    def _store(self) -> None:
        with self._database.writing() as connection:
            connection.executemany(_INSERT, self._staged)
        self._staged.clear()


def kind_of(row: bytes, *, is_success: bool) -> RowKind:
    """Return the kind of a printed row."""
    if not is_success:
        return RowKind.FAILED
    return RowKind.TRUNCATED if is_truncated(row) else RowKind.WHOLE


def _progress_of(rows: Sequence[FinishedRow], kinds: Sequence[RowKind]) -> Progress:
    """Return the total progress of rows."""
    completed = sum(row.is_success for row in rows)
    usage = sum((row.usage for row in rows), start=Usage())
    expected = sum((row.expected for row in rows), start=NO_TOKENS)
    return Progress(
        completed,
        len(rows) - completed,
        **usage._asdict(),
        expected_input_tokens=expected.input,
        expected_output_tokens=expected.output,
        reused=sum(row.is_reused for row in rows),
        truncated=kinds.count(RowKind.TRUNCATED),
    )


def read_row(descriptor: int, start: int, size: int) -> bytes:
    """Return the bytes of a row; raises RowsGone when the file is too short."""
    data = os.pread(descriptor, size, start)
    if len(data) != size:
        raise RowsGone("The file of the batch's finished rows ends before its last row.")
    return data
