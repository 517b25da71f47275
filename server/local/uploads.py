"""Table of multipart uploads; their parts are stored in a folder until they are joined."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from tidemill.batch.stored_file import File, Upload

from .database import Database
from .files import FileTable
from .folder import Folder, sync_folder

SCHEMA = """
CREATE TABLE IF NOT EXISTS uploads (
    id TEXT NOT NULL PRIMARY KEY,
    expires_at INTEGER NOT NULL,
    expires INTEGER,
    document TEXT NOT NULL
)
"""
_UPLOAD = TypeAdapter(Upload)
_CHUNK_BYTES: Final = 2**20


class UploadTable:
    """Uploads by id. A part is durable once `add_part` returns; parts have unique names."""

    def __init__(self, database: Database, files: FileTable, folder: Folder) -> None:
        self._database = database
        self._files = files
        self._folder = folder

    def create(self, upload: Upload) -> None:
        """Insert an upload and create the folder of its parts."""
        self._folder.parts_path(upload.id).mkdir()
        self._put(upload)

    def get(self, upload_id: str) -> Upload | None:
        """Return an upload, or None."""
        rows = self._database.read("SELECT document FROM uploads WHERE id = ?", upload_id)
        return _UPLOAD.validate_json(rows[0][0]) if rows else None

    def change(self, upload: Upload, **changes: Any) -> Upload:
        """Update fields and return the changed upload."""
        changed = replace(upload, **changes)
        self._put(changed)
        return changed

    def add_part(self, upload: Upload, name: str, path: Path) -> None:
        """Move the bytes at a path into the upload as a part; replaces one of the same name.

        Raises FileNotFoundError when the upload has ended.
        """
        folder = self._folder.parts_path(upload.id)
        path.rename(folder / name)
        sync_folder(folder)

    def sizes(self, upload: Upload) -> dict[str, int]:
        """Return the sizes of the uploaded parts, by name."""
        with suppress(FileNotFoundError):
            entries = os.scandir(self._folder.parts_path(upload.id))
            with entries:
                return {entry.name: entry.stat().st_size for entry in entries}
        return {}

    def join(self, upload: Upload, names: Sequence[str], to: Path) -> str:
        """Concatenate parts into one durable file, and return its MD5."""
        digest = hashlib.md5(usedforsecurity=False)
        with to.open("wb") as whole:
            for name in names:
                with (self._folder.parts_path(upload.id) / name).open("rb") as part:
                    while chunk := part.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        whole.write(chunk)
            whole.flush()
            os.fsync(whole.fileno())
        return digest.hexdigest()

    def complete(self, upload: Upload, path: Path, file: File, digest: str) -> Upload:
        """Store the bytes at a path as the upload's file, and delete the parts."""
        done = replace(upload, status="completed", digest=digest)
        path.rename(self._folder.file(file.id))
        sync_folder(self._folder.files)
        with self._database.writing() as connection:
            self._files.put_by(connection, file)
            connection.execute(_PUT, _values(done))
        self._delete_parts(done.id)
        return done

    def cancel(self, upload: Upload) -> Upload:
        """Cancel an upload and delete its parts."""
        cancelled = self.change(upload, status="cancelled")
        self._delete_parts(upload.id)
        return cancelled

    def delete_expired(self) -> None:
        """Delete parts of expired uploads, and records of those that ended long ago."""
        now = time.time()
        for (upload_id,) in self._database.read(
            "SELECT id FROM uploads WHERE expires_at <= ?", now
        ):
            self._delete_parts(upload_id)
        with self._database.writing() as connection:
            connection.execute("DELETE FROM uploads WHERE expires <= ?", (now,))

    def delete_orphans(self) -> None:
        """Delete parts without an upload; only while none is being created."""
        for path in self._folder.uploads.iterdir():
            if self.get(path.name) is None:
                self._delete_parts(path.name)

    def _put(self, upload: Upload) -> None:
        with self._database.writing() as connection:
            connection.execute(_PUT, _values(upload))

    def _delete_parts(self, upload_id: str) -> None:
        shutil.rmtree(self._folder.parts_path(upload_id), ignore_errors=True)


_PUT = (
    "INSERT INTO uploads (id, expires_at, expires, document) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at,"
    " expires = excluded.expires, document = excluded.document"
)


def _values(upload: Upload) -> tuple[object, ...]:
    text = _UPLOAD.dump_json(upload).decode()
    return (upload.id, upload.expires_at, upload.expires, text)
