"""Pages of finished rows by line number, while a batch runs and after its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tidemill.batch.model import Batch
from tidemill.batch.pagination import MAX_BYTES
from tidemill.batch.result_kinds import ERRORS, OUTPUT, has_merged_rows

from .batches import OPEN, BatchTable
from .database import Database
from .files import FileTable
from .folder import Folder
from .rows import RowsGone, read_row

# One query, so that positions and status agree: rows move when a batch ends.
_BEHIND: Final = (
    "SELECT line, start, size, is_success, status FROM rows JOIN batches ON place = batch"
    " WHERE id = ? AND line > ? AND is_success <= ? ORDER BY line LIMIT ?"
)
_ENDED: Final = (
    "SELECT id FROM batches WHERE status NOT IN (?, ?, ?, ?)"
    " AND EXISTS (SELECT 1 FROM rows WHERE batch = place)"
)


class RowPage(NamedTuple):
    """Rows with their line numbers, and whether more follow."""

    rows: Sequence[tuple[int, bytes]]
    has_more: bool


class Results:
    """Pages of the finished rows of all batches."""

    def __init__(
        self, database: Database, batches: BatchTable, files: FileTable, folder: Folder
    ) -> None:
        self._database = database
        self._batches = batches
        self._files = files
        self._folder = folder

    def page(
        self, batch: Batch, after_line: int, limit: int, *, failures_only: bool = False
    ) -> RowPage:
        """Return finished rows after a line, in line order, as many as a response holds.

        Raises RowsGone once the result files of the batch are deleted, or merged with a retry's.
        """
        if has_merged_rows(batch):
            raise RowsGone("The rows are in the batch's result files.")
        try:
            return self._page(batch, after_line, limit, failures_only=failures_only)
        except FileNotFoundError:
            pass  # the batch has just ended: its rows are in its files now
        try:
            return self._page(batch, after_line, limit, failures_only=failures_only)
        except FileNotFoundError:
            raise RowsGone("The batch's result files have been deleted.") from None

    def delete_unpublished(self) -> None:
        """Delete the row positions of ended batches whose files are gone."""
        for (batch_id,) in self._database.read(_ENDED, *OPEN):
            stored = self._batches.get(batch_id)
            assert stored is not None, batch_id
            ids = filter(None, (stored.batch.output_file_id, stored.batch.error_file_id))
            if all(self._files.get(file_id) is None for file_id in ids):
                with self._database.writing() as connection:
                    connection.execute("DELETE FROM rows WHERE batch = ?", (stored.place,))

    def _page(self, batch: Batch, after_line: int, limit: int, *, failures_only: bool) -> RowPage:
        most = 0 if failures_only else 1
        positions = self._database.read(_BEHIND, batch.id, after_line, most, limit + 1)
        if not positions and not self._is_indexed(batch):
            raise RowsGone("The rows of the batch are no longer listed.")
        rows: list[tuple[int, bytes]] = []
        room = MAX_BYTES
        with ExitStack() as stack:
            opened: dict[Path, int] = {}
            for line, start, size, is_success, status in positions[:limit]:
                room -= size
                if rows and room < 0:
                    break
                path = self._path_of(batch, status, is_success=is_success)
                if path not in opened:
                    opened[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
                rows.append((line, read_row(opened[path], start, size)))
        return RowPage(rows, len(rows) < len(positions))

    def _path_of(self, batch: Batch, status: str, *, is_success: bool) -> Path:
        if status in OPEN:
            return self._folder.rows_of(batch.id)
        return self._folder.file((OUTPUT if is_success else ERRORS).file_id_of(batch))

    def _is_indexed(self, batch: Batch) -> bool:
        """Say whether the row positions of a batch are still in the table."""
        stored = self._batches.get(batch.id)
        if stored is None or not stored.batch.is_terminal or not stored.progress.num_rows:
            return True
        query = "SELECT 1 FROM rows WHERE batch = ? LIMIT 1"
        found: list[Any] = self._database.read(query, stored.place)
        return bool(found)
