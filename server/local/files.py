"""Table of files: uploads of clients, and results of batches."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Literal

from pydantic import TypeAdapter

from tidemill.batch.stored_file import File

from .database import Database
from .folder import Folder

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    expires INTEGER,
    document TEXT NOT NULL
)
"""
_FILE = TypeAdapter(File)
_LISTS = {
    "desc": "SELECT document FROM files WHERE (expires IS NULL OR expires > ?1)"
    " AND (?2 IS NULL OR purpose = ?2)"
    " AND (?3 IS NULL OR place < (SELECT place FROM files WHERE id = ?3))"
    " ORDER BY place DESC LIMIT ?4",
    "asc": "SELECT document FROM files WHERE (expires IS NULL OR expires > ?1)"
    " AND (?2 IS NULL OR purpose = ?2)"
    " AND (?3 IS NULL OR place > (SELECT place FROM files WHERE id = ?3))"
    " ORDER BY place LIMIT ?4",
}


class FileTable:
    """Files by id and in order of creation; expired files are hidden."""

    def __init__(self, database: Database, folder: Folder) -> None:
        self._database = database
        self._folder = folder

    def put(self, file: File) -> None:
        """Insert a file whose bytes are in the folder."""
        with self._database.writing() as connection:
            self.put_by(connection, file)

    def put_by(self, connection: sqlite3.Connection, file: File) -> None:
        """Insert a file within a transaction; one of the same id is replaced."""
        connection.execute(
            "INSERT INTO files (id, purpose, expires, document) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET expires = excluded.expires,"
            " document = excluded.document",
            (file.id, file.purpose, file.expires, _FILE.dump_json(file).decode()),
        )

    def get(self, file_id: str) -> File | None:
        """Return a file, or None."""
        query = "SELECT document FROM files WHERE id = ? AND (expires IS NULL OR expires > ?)"
        rows = self._database.read(query, file_id, time.time())
        return _FILE.validate_json(rows[0][0]) if rows else None

    def list(
        self,
        *,
        limit: int,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> tuple[Sequence[File], bool]:
        """Return a page of files after `after`, and whether there are more.

        Raises KeyError when there is no file `after`.
        """
        if after is not None and self.get(after) is None:
            raise KeyError(after)
        rows = self._database.read(_LISTS[order], time.time(), purpose, after, limit + 1)
        return [_FILE.validate_json(text) for (text,) in rows[:limit]], len(rows) > limit

    def delete(self, file_id: str) -> bool:
        """Delete the bytes and the record of a file; False when there is none."""
        # Bytes first: a full disk has no room to record the deletion otherwise.
        self._folder.file(file_id).unlink(missing_ok=True)
        with self._database.writing() as connection:
            deleted = connection.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount
        return bool(deleted)

    def delete_expired(self) -> None:
        """Delete expired files."""
        query = "SELECT id FROM files WHERE expires <= ?"
        for (file_id,) in self._database.read(query, time.time()):
            self.delete(file_id)

    def delete_orphans(self) -> None:
        """Delete bytes without a record; only while no file is being created."""
        for path in self._folder.files.iterdir():
            if not self._database.read("SELECT 1 FROM files WHERE id = ?", path.name):
                path.unlink()
