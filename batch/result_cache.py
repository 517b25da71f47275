"""Result cache: replies of earlier runs, by what determines them, in a folder's SQLite database.

A run continues without a broken cache: all errors are raised as `CacheError`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple, Self

from .result_key import (
    KEY_BYTES,
    MAX_BYTES,
    VERSION,
    CacheDamaged,
    CacheError,
    Kept,
    Scope,
    unsealed,
)

FILE_NAME: Final = "results.sqlite"
_MAX_AGE_SECONDS: Final = 90 * 24 * 3600
_MAX_TIME: Final = 253_402_300_799  # in the year 9999
_DAY_SECONDS: Final = 24 * 3600
_BUSY_SECONDS: Final = 10.0
_DAMAGED_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ROWS_A_WRITE: Final = 256
_ROWS_A_TRIM: Final = 1_000
_ROWS_A_TOUCH: Final = 10_000

_PRAGMAS: Final = {
    "auto_vacuum": "INCREMENTAL",
    "journal_mode": "WAL",
    "synchronous": "NORMAL",
}
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS results (
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, model TEXT NOT NULL, used INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS results_used ON results (used);
"""
_TOTALS: Final = """
SELECT model, COUNT(*), SUM(size), MAX(used) FROM (
    SELECT IFNULL(CAST(model AS TEXT), '') AS model,
        IFNULL(LENGTH(CAST(record AS BLOB)), 0) AS size,
        MIN(MAX(IFNULL(CAST(used AS INTEGER), 0), 0), ?) AS used FROM results
) GROUP BY model ORDER BY MAX(used) DESC, model
"""
_TABLE: Final = "results"
_COLUMNS: Final = frozenset({"key"})
"""Columns of the table in all versions."""

_OLDER_COLUMNS: Final = "SELECT key, created, digest, checksum, body FROM results LIMIT 0"


class Totals(NamedTuple):
    """Results of a model in a cache; `used` is the day (Unix seconds) of the last use."""

    model: str
    num_results: int
    num_bytes: int
    used: int


class ResultCache:
    """Results of one scope in a folder's database, used by one thread at a time.

    `num_damaged` counts results whose bytes are not the ones that were written; they are treated
    as missing. Closing it removes results that were not used for 90 days, and the least recently
    used ones while the total exceeds `max_bytes`.
    """

    def __init__(
        self, folder: Path, database: sqlite3.Connection, scope: Scope, max_bytes: int = MAX_BYTES
    ) -> None:
        self.num_damaged = 0
        self._folder = folder
        self._database = database
        self._scope = scope
        self._max_bytes = max_bytes
        self._new: dict[bytes, Kept] = {}
        self._found: list[tuple[int, int]] = []
        self._today = _day(time.time())

    @classmethod
    def open(cls, folder: Path, scope: Scope, max_bytes: int = MAX_BYTES) -> Self:
        """Open the cache of a folder, and create it if it is missing."""
        return cls(folder, open_database(folder), scope, max_bytes)

    def find(self, key: bytes, digest: str, created: int) -> bytes | None:
        """Return the JSON of a reply, adapted to the line of a digest and this creation time."""
        key = self._in_scope(key)
        if (new := self._new.get(key)) is not None:
            return new.reply_for(digest, created)
        try:
            with _raising(self._folder):
                found = self._database.execute(
                    "SELECT id, used, record FROM results WHERE key = ?", (key,)
                ).fetchone()
        except CacheDamaged:  # other pages may be intact
            self.num_damaged += 1
            return None
        if found is None:
            return None
        place, used, record = found
        if (kept := unsealed(key, record)) is None:
            self.num_damaged += 1
            return None
        if used != self._today:
            self._found.append((self._today, place))
            if len(self._found) >= _ROWS_A_TOUCH:
                self.flush()
        return kept.reply_for(digest, created)

    def add(self, key: bytes, digest: str, created: int, body: bytes) -> None:
        """Add the reply to a line of a digest; it is written with later ones, or by `flush`."""
        self._new[self._in_scope(key)] = Kept(digest, created, body)
        if len(self._new) >= _ROWS_A_WRITE:
            self.flush()

    def flush(self) -> None:
        """Write the added results, and the time of use of the results found."""
        new, self._new = self._new, {}
        found, self._found = self._found, []
        with _raising(self._folder), self._database:
            self._database.executemany(
                "INSERT OR REPLACE INTO results (key, model, used, record) VALUES (?, ?, ?, ?)",
                (
                    (key, self._scope.model, self._today, kept.sealed(key))
                    for key, kept in new.items()
                ),
            )
            self._database.executemany("UPDATE results SET used = ? WHERE id = ?", found)

    def _in_scope(self, key: bytes) -> bytes:
        return blake2b(key, digest_size=KEY_BYTES, key=self._scope.digest).digest()

    def close(self) -> None:
        """Write the added results, remove old and excess ones, and close the database."""
        with closing(self._database):
            self.flush()
            with _raising(self._folder):
                remove_results(self._database, before=self._today - _MAX_AGE_SECONDS)
                trim(self._database, self._max_bytes)


def open_database(folder: Path) -> sqlite3.Connection:
    """Return the database of a folder; raises CacheError if it is damaged or not a result cache.

    Results of an earlier version can never be found, so they are removed.
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise CacheError(f"cannot create the folder {folder} ({exc.strerror})") from exc
    with ExitStack() as stack, _raising(folder):
        database = stack.enter_context(
            closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False))
        )
        database.text_factory = partial(str, encoding="utf-8", errors="replace")
        version = _version(database)
        if 0 <= version <= VERSION:
            _check_tables(database, path)
            for name, value in _PRAGMAS.items():
                database.execute(f"PRAGMA {name} = {value}")
            if 0 < version < VERSION:
                _remove_older(database)
            database.executescript(_TABLES)
            database.execute(f"PRAGMA user_version = {VERSION}")
            stack.pop_all()
            return database
    raise CacheError(f"{path} was written by another version of Tidemill: use another folder")


def _check_tables(database: sqlite3.Connection, path: Path) -> None:
    """Raise CacheError for another program's database, before anything is written to it."""
    named = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    others = sorted({name for (name,) in named if not name.startswith("sqlite_")} - {_TABLE})
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({_TABLE})")}
    if columns and not columns >= _COLUMNS:
        others.append(_TABLE)
    if others:
        raise CacheError(
            f"{path} is another program's database, with the table {others[0]!r}: use another "
            "folder"
        )


def _version(database: sqlite3.Connection) -> int:
    [version] = database.execute("PRAGMA user_version").fetchone()
    return int(version)


def _remove_older(database: sqlite3.Connection) -> None:
    """Remove the table of an earlier version, unless another run has already replaced it."""
    with database:
        database.execute("BEGIN IMMEDIATE")
        if _version(database) < VERSION:
            database.execute(_OLDER_COLUMNS)  # raises for a table that is not ours
            database.execute("DROP TABLE results")
            database.execute(f"PRAGMA user_version = {VERSION}")


def delete_database(folder: Path) -> None:
    """Delete the database of a folder with its journals; raises OSError."""
    for suffix in ("", "-wal", "-shm"):
        (folder / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)


def list_totals(database: sqlite3.Connection) -> list[Totals]:
    """Return the totals of each model, most recently used first.

    Columns of damaged results are cast to their types.
    """
    with _raising():
        rows = database.execute(_TOTALS, (_MAX_TIME,))
        return [Totals(*row) for row in rows]


def remove_results(
    database: sqlite3.Connection, *, model: str | None = None, before: int | None = None
) -> int:
    """Remove the results of one or all models last used before a time; return their number."""
    with _raising(), database:
        removed = database.execute(
            "DELETE FROM results WHERE (:before IS NULL OR used < :before)"
            " AND (:model IS NULL OR model = :model)",
            {"model": model, "before": before},
        ).rowcount
    _give_back_pages(database)
    return removed


def check_whole(database: sqlite3.Connection) -> None:
    """Raise CacheDamaged for a database with a damaged structure; reads all of it."""
    with _raising():
        [found] = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise CacheDamaged(f"the result cache is damaged ({found})")


def trim(database: sqlite3.Connection, max_bytes: int) -> None:
    """Remove the least recently used results until the total is at most `max_bytes`."""
    with _raising():
        while _num_bytes(database) > max_bytes:
            with database:
                removed = database.execute(
                    "DELETE FROM results WHERE id IN"
                    " (SELECT id FROM results ORDER BY used, id LIMIT ?)",
                    (_ROWS_A_TRIM,),
                ).rowcount
            if not removed:
                break
    _give_back_pages(database)


def _num_bytes(database: sqlite3.Connection) -> int:
    """Return the size of a database without free pages."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    return int((pages - free) * size)


def _give_back_pages(database: sqlite3.Connection) -> None:
    with _raising():
        database.executescript("PRAGMA incremental_vacuum")  # `execute` would free one page


def _day(now: float) -> int:
    return int(now) // _DAY_SECONDS * _DAY_SECONDS


@contextmanager
def _raising(folder: Path | None = None) -> Iterator[None]:
    """Raise every error of a database, however it is damaged, as CacheError."""
    try:
        yield
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        words = f"cannot use the result cache: {exc}"
        if code not in _DAMAGED_CODES:
            raise CacheError(words) from exc
        raise _damaged(words, folder) from exc
    except (MemoryError, OverflowError, UnicodeError) as exc:
        raise _damaged(f"the result cache is damaged ({exc!r})", folder) from exc


def _damaged(words: str, folder: Path | None) -> CacheDamaged:
    if folder is None:
        return CacheDamaged(words)
    return CacheDamaged(f"{words}; delete it with `tidemill cache remove {quote(str(folder))}`")
