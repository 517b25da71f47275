"""SQLite database of all tables: a write is durable when it returns."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from .folder import FolderRefused

_VERSION = 2


class Database:
    """One connection that any thread may use; a lock serialises calls."""

    def __init__(self, path: Path, schemas: Iterable[str], upgrades: Iterable[str] = ()) -> None:
        """Open the file and create missing tables; raises FolderRefused.

        `upgrades` change the tables of the version before.
        """
        self._lock = threading.RLock()
        try:
            path.touch(0o600)  # it contains prompts and answers
            with ExitStack() as stack:
                self._connection = stack.enter_context(
                    closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None))
                )
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                is_old = self._version(path) == _VERSION - 1
                with self.writing() as connection:
                    for statement in (*(upgrades if is_old else ()), *schemas):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
                stack.pop_all()
        except (OSError, sqlite3.Error) as exc:
            raise FolderRefused(f"cannot open the database {path}: {exc}") from exc

    def _version(self, path: Path) -> int:
        version: int
        [(version,)] = self._connection.execute("PRAGMA user_version").fetchall()
        if version > _VERSION:
            raise FolderRefused(
                f"{path} was written by a newer version: upgrade Tidemill, or use another folder"
            )
        return version

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

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep other threads from writing between reads."""
        with self._lock:
            yield

    def read(self, query: str, *values: object) -> list[Any]:
        """Return all rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the database; called once, last."""
        with self._lock:
            self._connection.close()
