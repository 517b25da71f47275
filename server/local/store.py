"""Store of a server: its data folder and the tables over it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.batch.file.formats import detect_file
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import result_file_id
from tidemill.batch.result_kinds import KINDS, ResultKind
from tidemill.batch.stored_file import File

from . import batches, files, history, input_lines, responses, rows, uploads
from .batches import BatchTable
from .database import Database
from .files import FileTable
from .folder import Folder, is_full, lock_folder, sync_folder
from .input_lines import InputLines
from .responses import ResponseTable
from .results import Results
from .rows import Rows
from .uploads import UploadTable

if TYPE_CHECKING:
    from tidemill.batch.file.echoed_fields import EchoedFields


@dataclass(frozen=True, slots=True)
class Store:
    """A locked data folder and its tables."""

    folder: Folder
    database: Database
    files: FileTable
    batches: BatchTable
    uploads: UploadTable
    results: Results
    input_lines: InputLines
    responses: ResponseTable

    def input_path(self, batch_id: str) -> Path:
        """Return the path of a batch's input: its own hard link to the file."""
        return self.folder.work_path(batch_id) / "input"

    def add_file(self, path: Path, file: File) -> None:
        """Move the bytes at a path into the store as a file, durably."""
        path.rename(self.folder.file(file.id))
        sync_folder(self.folder.files)
        self.files.put(file)

    def link_input(self, file_id: str, batch_id: str) -> bool:
        """Hard-link a file as the input of a batch; False if it is gone.

        The file may be deleted afterwards.
        """
        link = self.input_path(batch_id)
        link.parent.mkdir(exist_ok=True)
        try:
            link.hardlink_to(self.folder.file(file_id))
        except FileExistsError:  # by the same request, repeated
            return True
        except FileNotFoundError:
            return False
        except OSError as exc:
            if is_full(exc):
                raise
            copy = link.with_name("copy")  # on a file system without hard links
            shutil.copyfile(self.folder.file(file_id), copy)
            copy.rename(link)
        sync_folder(link.parent)
        return True

    def rows_of(self, batch_id: str) -> Rows:
        """Return the finished rows of a running batch."""
        return Rows(self.database, self.batches, batch_id, self.folder.rows_of(batch_id))

    def echoed_fields(self, batch: Batch) -> EchoedFields | None:
        """Return the fields that rows of a batch have of their lines; None without any."""
        if not batch.options.echo_fields:
            return None
        from tidemill.batch.file.echoed_fields import EchoedFields  # late: few batches have them

        path = self.input_path(batch.id)
        retried = None if batch.retry is None else self.batches.get(batch.retry.of)
        if retried is not None:  # the lines of the retry have become requests
            path = self.folder.file(retried.batch.input_file_id)
        vendor = None
        with suppress(FileNotFoundError), path.open("rb") as file:
            vendor = detect_file(file).vendor
        return EchoedFields(batch.options.echo_fields, vendor)

    def delete_batch(self, batch_id: str) -> None:
        """Delete a batch that has ended, with its input, its results and its history.

        Its merged retries and the results before them are deleted too.
        """
        stored = self.batches.get(batch_id)
        if stored is None:
            return
        batch, place = stored.batch, stored.place
        ids = {batch.input_file_id, *(kind.file_id_of(batch) for kind in KINDS)}
        ids |= {kind.field(batch, "file_id") for kind in KINDS}
        for retry_id in self.batches.merged_retries(batch_id):
            ids |= {merged_file_id(kind, batch_id, retry_id) for kind in KINDS}
            self.delete_batch(retry_id)
        for file_id in ids:
            if file_id is not None:
                self.files.delete(file_id)
        with self.database.writing() as connection:
            connection.execute("DELETE FROM rows WHERE batch = ?", (place,))
            connection.execute("DELETE FROM line_blocks WHERE batch = ?", (place,))
            connection.execute("DELETE FROM history WHERE batch = ?", (batch.id,))
            connection.execute("DELETE FROM batches WHERE place = ?", (place,))

    def delete_work(self, batch_id: str) -> None:
        """Delete the work folder of a batch that has ended."""
        shutil.rmtree(self.folder.work_path(batch_id), ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete expired files, uploads and responses, and rows whose files are gone."""
        self.responses.delete_expired(time.time())
        self.files.delete_expired()
        self.uploads.delete_expired()
        self.results.delete_unpublished()

    def clean_up(self) -> None:
        """Delete the leftovers of a killed server; called once, at the start."""
        self.delete_expired()
        self.files.delete_orphans()
        self.uploads.delete_orphans()
        still_open = set(self.batches.open_ids())
        for path in self.folder.work.iterdir():
            if path.name in still_open:
                continue
            if self.batches.get(path.name) is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                self.delete_work(path.name)


def merged_file_id(kind: ResultKind, batch_id: str, retry_id: str) -> str:
    """Return the ID of a result file of a batch after the rows of a retry were merged into it."""
    return result_file_id(retry_id, f"{kind.name} of {batch_id}")


@contextmanager
def open_store(root: Path) -> Iterator[Store]:
    """Lock the data folder and open or create its tables; raises FolderRefused."""
    with lock_folder(root) as folder:
        database = Database(
            folder.database,
            (
                *(files.SCHEMA, batches.SCHEMA, history.SCHEMA, uploads.SCHEMA),
                *(rows.SCHEMA, *rows.INDEXES, input_lines.SCHEMA, responses.SCHEMA),
                *responses.INDEXES,
            ),
            rows.UPGRADES,
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
                InputLines(database, folder),
                ResponseTable(database),
            )
        finally:
            database.close()
