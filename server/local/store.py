"""All that a server keeps: its folder, and the tables of what lies in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from handler.batch.model import File
from server.local import batches, files, rows, uploads
from server.local.batches import BatchTable
from server.local.database import Database
from server.local.files import FileTable
from server.local.folder import Folder, held, is_full, sync_folder
from server.local.results import Results
from server.local.rows import Rows
from server.local.uploads import UploadTable


@dataclass(frozen=True, slots=True)
class Store:
    """A folder that is held, and its tables."""

    folder: Folder
    database: Database
    files: FileTable
    batches: BatchTable
    uploads: UploadTable
    results: Results

    def input_of(self, batch_id: str) -> Path:
        """Return where a batch reads its lines: a name of its own for the file's bytes."""
        return self.folder.work_of(batch_id) / "input"

    def keep(self, path: Path, file: File) -> None:
        """Make the bytes at a path those of a file, durably."""
        path.rename(self.folder.file(file.id))
        sync_folder(self.folder.files)
        self.files.put(file)

    def lend(self, file_id: str, batch_id: str) -> bool:
        """Give a batch the bytes of a file for as long as it needs them; False if they are gone.

        The file may then be deleted.
        """
        lent = self.input_of(batch_id)
        lent.parent.mkdir(exist_ok=True)
        try:
            lent.hardlink_to(self.folder.file(file_id))
        except FileExistsError:  # by the same request, which was repeated
            return True
        except FileNotFoundError:
            return False
        except OSError as exc:
            if is_full(exc):
                raise
            copy = lent.with_name("copy")  # on a file system that has no such names
            shutil.copyfile(self.folder.file(file_id), copy)
            copy.rename(lent)
        sync_folder(lent.parent)
        return True

    def rows_of(self, batch_id: str) -> Rows:
        """Return the finished rows of a batch that has not ended."""
        return Rows(self.database, self.batches, batch_id, self.folder.rows_of(batch_id))

    def drop_work(self, batch_id: str) -> None:
        """Drop what nobody needs of a batch that has ended."""
        shutil.rmtree(self.folder.work_of(batch_id), ignore_errors=True)

    def drop_expired(self) -> None:
        """Drop what nobody may fetch or complete any more."""
        self.files.drop_expired()
        self.uploads.drop_expired()
        self.results.drop_unpublished()

    def clear_up(self) -> None:
        """Drop whatever a server left behind that was killed; called before anything is made."""
        self.drop_expired()
        self.files.drop_strays()
        self.uploads.drop_strays()
        still_open = set(self.batches.open_ids())
        for path in self.folder.work.iterdir():
            if path.name in still_open:
                continue
            if self.batches.get(path.name) is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                self.drop_work(path.name)


@contextmanager
def open_store(root: Path) -> Iterator[Store]:
    """Hold a folder with all that is kept there, or a new one; raises FolderRefused."""
    with held(root) as folder:
        database = Database(
            folder.database, (files.SCHEMA, batches.SCHEMA, rows.SCHEMA, uploads.SCHEMA)
        )
        try:
            file_table, batch_table = FileTable(database, folder), BatchTable(database)
            yield Store(
                folder,
                database,
                file_table,
                batch_table,
                UploadTable(database, file_table, folder),
                Results(database, batch_table, file_table, folder),
            )
        finally:
            database.close()
