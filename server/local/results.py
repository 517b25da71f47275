"""Finished rows by line number, while a batch runs and after its end: in pages and in searches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager
from heapq import merge
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

from tidemill.batch.model import Batch
from tidemill.batch.pagination import MAX_BYTES
from tidemill.batch.parts import RowKind
from tidemill.batch.result_kinds import ERRORS, OUTPUT
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.rows_page import SEARCHED_BYTES, SearchedRow, StoredRows, select_rows

from .batches import OPEN, BatchTable, StoredBatch
from .database import Database
from .files import FileTable
from .folder import Folder
from .rows import RowsGone, read_row

_AFTER: Final = (
    "SELECT line, start, size, kind FROM rows {} WHERE batch = ? AND line > ? {}"
    " ORDER BY line LIMIT ?"
)
_OF_KIND: Final = {
    kind: _AFTER.format(f"INDEXED BY rows_of_kind_{kind:d}" if kind else "", f"AND kind = {kind:d}")
    for kind in RowKind
}
_ENDED: Final = (
    "SELECT id FROM batches WHERE status NOT IN (?, ?, ?, ?)"
    " AND EXISTS (SELECT 1 FROM rows WHERE batch = place)"
)
_SEARCHED_AT_ONCE: Final = 1024
_MAX_ROW_BYTES: Final = 2**26
_Found = TypeVar("_Found")


class RowPage(NamedTuple):
    """Rows with their line numbers, and whether more follow."""

    rows: list[tuple[int, bytes]]
    has_more: bool


class _Position(NamedTuple):
    line: int
    start: int
    size: int
    kind: int


class Results:
    """The finished rows of all batches.

    Methods raise RowsGone once the rows are deleted.
    """

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
        """Return finished rows after a line, in line order, as many as a response holds."""
        kinds = {RowKind.FAILED} if failures_only else frozenset(RowKind)

        def read() -> RowPage:
            stored, positions = self._positions(batch.id, after_line, kinds, limit + 1)
            rows: list[tuple[int, bytes]] = []
            room = MAX_BYTES
            with _OpenRows.of(stored, self._folder) as opened:
                for position in positions[:limit]:
                    room -= position.size
                    if rows and room < 0:
                        break
                    rows.append((position.line, opened.read(position)))
            return RowPage(rows, len(rows) < len(positions))

        return _with_files(read)

    def search(
        self, batch: Batch, query: RowQuery, limit: int, max_bytes: int = SEARCHED_BYTES
    ) -> StoredRows:
        """Return the first rows that match, or those of the first bytes that may match.

        A row above 4 MB is read only by its line number, and none above 64 MiB.
        """

        def search() -> StoredRows:
            with closing(self._rows(batch.id, query, limit)) as rows:
                return select_rows(rows, query, limit, max_bytes=max_bytes)

        return _with_files(search)

    def delete_unpublished(self) -> None:
        """Delete the row positions of ended batches whose files are gone."""
        for (batch_id,) in self._database.read(_ENDED, *OPEN):
            stored = self._batches.get(batch_id)
            if stored is None:  # deleted just now
                continue
            ids = filter(None, (stored.batch.output_file_id, stored.batch.error_file_id))
            if all(self._files.get(file_id) is None for file_id in ids):
                with self._database.writing() as connection:
                    connection.execute("DELETE FROM rows WHERE batch = ?", (stored.place,))

    def _rows(self, batch_id: str, query: RowQuery, limit: int) -> Generator[SearchedRow]:
        """Yield rows that may match."""
        through = query.begin - 1
        # Without other conditions each of them matches.
        num_read = _SEARCHED_AT_ONCE if query.reads_rows else limit + 1
        max_bytes = MAX_BYTES if query.line is None else _MAX_ROW_BYTES
        while True:
            stored, positions = self._positions(batch_id, through, query.kinds, num_read)
            with _OpenRows.of(stored, self._folder) as opened:
                for position in positions:
                    row = opened.read(position) if position.size <= max_bytes else None
                    yield SearchedRow(position.line, row, RowKind(position.kind))
                    through = position.line
            if len(positions) < num_read:
                return

    def _positions(
        self, batch_id: str, after_line: int, kinds: Collection[RowKind], limit: int
    ) -> tuple[StoredBatch, list[_Position]]:
        """Return positions of rows, and the batch at that moment: rows move when it ends."""
        with self._database.unchanged():
            stored = self._batches.get(batch_id)
            if stored is None:
                raise RowsGone("The batch has been deleted.")
            is_all = len(kinds) == len(RowKind)
            queries = [_AFTER.format("", "")] if is_all else [_OF_KIND[kind] for kind in kinds]
            read = [self._database.read(each, stored.place, after_line, limit) for each in queries]
            if not any(read) and not self._is_indexed(stored):
                raise RowsGone("The rows of the batch are no longer listed.")
        return stored, [_Position(*row) for row in merge(*read)][:limit]

    def _is_indexed(self, stored: StoredBatch) -> bool:
        """Say whether the row positions of a batch are still in the table."""
        if not stored.batch.is_terminal or not stored.progress.num_rows:
            return True
        query = "SELECT 1 FROM rows WHERE batch = ? LIMIT 1"
        found: list[Any] = self._database.read(query, stored.place)
        return bool(found)


class _OpenRows:
    """The files of a batch's rows, opened at their first use."""

    def __init__(self, paths: dict[bool, Path | None]) -> None:
        self._paths = paths
        self._opened: dict[Path, Any] = {}

    @classmethod
    @contextmanager
    def of(cls, stored: StoredBatch, folder: Folder) -> Iterator[Self]:
        """Yield the files, which are closed at the end."""
        batch = stored.batch
        if batch.status in OPEN:
            paths = dict.fromkeys((False, True), folder.rows_of(batch.id))
        else:
            ids = {True: ERRORS.field(batch, "file_id"), False: OUTPUT.field(batch, "file_id")}
            paths = {is_failed: folder.file(each) for is_failed, each in ids.items() if each}
        opened = cls({**paths})
        try:
            yield opened
        finally:
            for file in opened._opened.values():
                file.close()

    def read(self, position: _Position) -> bytes:
        """Return a row; raises FileNotFoundError, and RowsGone for a file that is too short."""
        path = self._paths.get(position.kind == RowKind.FAILED)
        if path is None:
            raise FileNotFoundError
        if path not in self._opened:
            self._opened[path] = path.open("rb", buffering=0)
        return read_row(self._opened[path].fileno(), position.start, position.size)


def _with_files(read: Callable[[], _Found]) -> _Found:
    """Return rows; raises RowsGone once the files are deleted."""
    try:
        return read()
    except FileNotFoundError:
        pass  # the batch has just ended: its rows are in other files now
    try:
        return read()
    except FileNotFoundError:
        raise RowsGone("The batch's result files have been deleted.") from None
