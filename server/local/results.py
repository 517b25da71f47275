"""Finished rows by their lines, a page at a time, while a batch runs and after its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from handler.batch.kinds import ERRORS, OUTPUT
from handler.batch.model import Batch
from handler.batch.page import MAX_BYTES
from server.local.batches import OPEN, BatchTable
from server.local.database import Database
from server.local.files import FileTable
from server.local.folder import Folder
from server.local.rows import RowsGone, read_row

# In one query, so that where rows lie belongs to the status: they move when a batch ends.
_BEHIND: Final = (
    "SELECT line, start, size, is_success, status FROM rows JOIN batches ON place = batch"
    " WHERE id = ? AND line > ? ORDER BY line LIMIT ?"
)
_ENDED: Final = (
    "SELECT id FROM batches WHERE status NOT IN (?, ?, ?, ?)"
    " AND EXISTS (SELECT 1 FROM rows WHERE batch = place)"
)


class RowPage(NamedTuple):
    """Rows with their lines, and whether there are more behind them."""

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

    def page(self, batch: Batch, after_line: int, limit: int) -> RowPage:
        """Return finished rows behind a line, in the order of lines, as many as an answer holds.

        Raises RowsGone once the files of the batch, where its rows lie, are gone.
        """
        try:
            return self._page(batch, after_line, limit)
        except FileNotFoundError:
            pass  # the batch has ended since: its rows lie in its files now
        try:
            return self._page(batch, after_line, limit)
        except FileNotFoundError:
            raise RowsGone("The files of the batch are gone.") from None

    def drop_unpublished(self) -> None:
        """Forget where rows of ended batches lay whose files are gone."""
        for (batch_id,) in self._database.read(_ENDED, *OPEN):
            kept = self._batches.get(batch_id)
            assert kept is not None, batch_id
            ids = filter(None, (kept.batch.output_file_id, kept.batch.error_file_id))
            if all(self._files.get(file_id) is None for file_id in ids):
                with self._database.writing() as connection:
                    connection.execute("DELETE FROM rows WHERE batch = ?", (kept.place,))

    def _page(self, batch: Batch, after_line: int, limit: int) -> RowPage:
        found = self._database.read(_BEHIND, batch.id, after_line, limit + 1)
        if not found and not self._is_indexed(batch):
            raise RowsGone("The rows of the batch are no longer listed.")
        rows: list[tuple[int, bytes]] = []
        room = MAX_BYTES
        with ExitStack() as stack:
            opened: dict[Path, int] = {}
            for line, start, size, is_success, status in found[:limit]:
                room -= size
                if rows and room < 0:
                    break
                path = self._path_of(batch, status, is_success=is_success)
                if path not in opened:
                    opened[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
                rows.append((line, read_row(opened[path], start, size)))
        return RowPage(rows, len(rows) < len(found))

    def _path_of(self, batch: Batch, status: str, *, is_success: bool) -> Path:
        if status in OPEN:
            return self._folder.rows_of(batch.id)
        return self._folder.file((OUTPUT if is_success else ERRORS).file_id_of(batch))

    def _is_indexed(self, batch: Batch) -> bool:
        """Say whether the rows that a batch has, if any, are listed."""
        kept = self._batches.get(batch.id)
        if kept is None or not kept.batch.is_terminal or not kept.progress.num_rows:
            return True
        query = "SELECT 1 FROM rows WHERE batch = ? LIMIT 1"
        found: list[Any] = self._database.read(query, kept.place)
        return bool(found)
