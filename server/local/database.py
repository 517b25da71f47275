"""SQLite database of all tables: a write is durable when it returns."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from .folder import FolderRefused

_VERSION = 1


class Database:
    """One connection that any thread may use; a lock serialises calls."""

    def __init__(self, path: Path, schemas: Iterable[str]) -> None:
        """Open the file and create missing tables; raises FolderRefused."""
        self._lock = threading.RLock()
        try:
            with ExitStack() as stack:
                self._connection = stack.enter_context(
                    closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None))
                )
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                self._check_version(path)
                for schema in schemas:
                    self._connection.execute(schema)
                self._connection.execute(f"PRAGMA user_version = {_VERSION}")
                stack.pop_all()
        except sqlite3.Error as exc:
            raise FolderRefused(f"cannot open the database {path}: {exc}") from exc

    def _check_version(self, path: Path) -> None:
        [(version,)] = self._connection.execute("PRAGMA user_version").fetchall()
        if version not in (0, _VERSION):
            raise FolderRefused(
                f"{path} was written by a newer version: upgrade Tidemill, or use another folder"
            )

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: all of its writes, or none."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # some errors have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, query: str, *values: object) -> list[Any]:
        """Return all rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the database; called once, last."""
        with self._lock:
            self._connection.close()
