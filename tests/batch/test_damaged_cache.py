"""Result caches with flipped, missing and foreign bytes: one error, and no other line's reply."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tidemill.batch import result_cache
from tidemill.batch.result_cache import FILE_NAME, ResultCache, list_totals, open_database
from tidemill.batch.result_key import VERSION, CacheDamaged, CacheError, Kept, Scope, unsealed

SCOPE = Scope(b"one", "model")
LINE = "a" * 24
PAGE_BYTES = 4_096
STEP = 113
"""Distance of the damaged bytes, which is coprime to the size of every structure of a page."""


def key_of(number: int) -> bytes:
    """Return the key of a request."""
    return b"%016d" % number


def reply_of(number: int) -> bytes:
    """Return the reply to a request; the reply to request 7 takes several pages."""
    return b'{"created":1,"text":"%d"}' % number + b" " * (6_000 if number == 7 else 40)


@cache
def whole() -> bytes:
    """Return the bytes of a database with the results of 40 requests."""
    with TemporaryDirectory() as folder:
        with closing(ResultCache.open(Path(folder), SCOPE)) as results:
            for number in range(40):
                results.add(key_of(number), LINE, 1, reply_of(number))
        with closing(open_database(Path(folder))) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return (Path(folder) / FILE_NAME).read_bytes()


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no database wait for the disk."""
    pragmas = {**result_cache._PRAGMAS, "synchronous": "OFF"}
    monkeypatch.setattr(result_cache, "_PRAGMAS", pragmas)


def use(folder: Path, data: bytes) -> tuple[int, int, bool]:
    """Find, replace and list the results of a database with these bytes.

    Returns the numbers of found and damaged results, and whether the cache failed.
    """
    for suffix in ("-wal", "-shm"):
        (folder / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)
    (folder / FILE_NAME).write_bytes(data)
    num_found = num_damaged = 0
    has_failed = True
    with suppress(CacheError):
        results = ResultCache.open(folder, SCOPE)
        try:
            for number in range(41):  # one more than there are
                reply = results.find(key_of(number), LINE, 1)
                assert reply in (None, reply_of(number) if number < 40 else None)
                num_found += reply is not None
                if reply is None:
                    results.add(key_of(number), LINE, 1, reply_of(number))
            num_damaged = results.num_damaged
            has_failed = False
        finally:
            with suppress(CacheError):
                results.close()
    with suppress(CacheError), closing(open_database(folder)) as database:
        for total in list_totals(database):
            assert isinstance(total.model, str)
            assert all(isinstance(each, int) for each in total[1:]), total
    return num_found, num_damaged, has_failed


@pytest.mark.parametrize("page", range(8))
def test_a_flipped_bit_never_gives_another_lines_reply(tmp_path: Path, page: int) -> None:
    """Any structure of the database may have it; intact results are found."""
    data = whole()
    found = []
    for place in range(page * PAGE_BYTES, min(len(data), (page + 1) * PAGE_BYTES), STEP):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        found.append(use(tmp_path, bytes(damaged)))
    assert len(data) <= 8 * PAGE_BYTES
    assert max(num_found for num_found, _, _ in found) == 40


@pytest.mark.parametrize("size", [0, 1, 50, 99, 100, 4_095, 4_096, 5_000, 8_192, 20_000, -1])
def test_a_truncated_database_never_gives_another_lines_reply(tmp_path: Path, size: int) -> None:
    """The length does not matter."""
    num_found, _, _ = use(tmp_path, whole()[:size])
    assert num_found < 40


def test_an_index_that_points_to_another_row_finds_nothing(tmp_path: Path) -> None:
    """One flipped bit of an index can do that, but the checksum covers the key."""
    (tmp_path / FILE_NAME).write_bytes(whole())
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        keys = [key for [key] in database.execute("SELECT key FROM results ORDER BY id LIMIT 2")]
        database.execute("UPDATE results SET key = x'00' WHERE id = 1")
        database.execute("UPDATE results SET key = ? WHERE id = 2", (keys[0],))
    with closing(ResultCache.open(tmp_path, SCOPE)) as results:
        assert results.find(key_of(0), LINE, 1) is None
        assert results.num_damaged == 1
        results.add(key_of(0), LINE, 1, reply_of(0))
    with closing(ResultCache.open(tmp_path, SCOPE)) as results:
        assert results.find(key_of(0), LINE, 1) == reply_of(0)
        assert results.num_damaged == 0


def test_a_record_belongs_only_to_its_key() -> None:
    """Any flipped bit, another key or another type makes it unreadable."""
    kept = Kept(LINE, 1, b'{"text":"a b"}')
    record = kept.sealed(key_of(1))
    assert unsealed(key_of(1), record) == kept
    for place in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[place // 8] ^= 1 << place % 8
        assert unsealed(key_of(1), bytes(damaged)) is None
    for other in (record[:-1], record + b" ", b"", record.decode("latin-1"), 7, None):
        assert unsealed(key_of(1), other) is None
    assert unsealed(key_of(2), record) is None


def test_results_of_an_earlier_version_are_not_found(tmp_path: Path) -> None:
    """They are removed and replaced by new ones."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.executescript(
            "CREATE TABLE results (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE,"
            " model TEXT NOT NULL, used INTEGER NOT NULL, created INTEGER NOT NULL,"
            " digest TEXT NOT NULL, checksum INTEGER NOT NULL, body BLOB NOT NULL);"
            "INSERT INTO results VALUES (1, x'00', 'model', 0, 1, 'a', 0, x'7b7d');"
            "PRAGMA user_version = 1"
        )
    with closing(ResultCache.open(tmp_path, SCOPE)) as results:
        assert results.find(key_of(0), LINE, 1) is None
        results.add(key_of(0), LINE, 1, reply_of(0))
    with closing(open_database(tmp_path)) as database:
        assert [total.num_results for total in list_totals(database)] == [1]
        assert database.execute("PRAGMA user_version").fetchone() == (VERSION,)


def not_a_database(path: Path) -> None:
    """Write other bytes."""
    path.write_bytes(b"something else" * 1_000)


def malformed(path: Path) -> None:
    """Overwrite the schema table."""
    data = bytearray(whole())
    data[100:108] = b"\xff" * 8
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [not_a_database, malformed])
def test_a_damaged_database_can_be_deleted_by_the_advised_command(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    """The command contains the folder, quoted for a shell."""
    folder = tmp_path / "kept results"
    folder.mkdir()
    harm(folder / FILE_NAME)
    with pytest.raises(
        CacheDamaged, match=r"; delete it with `tidemill cache remove '.*/kept results'`"
    ):
        closing(ResultCache.open(folder, SCOPE)).thing.find(key_of(0), LINE, 1)


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_locked_database_is_one_error(
    tmp_path: Path, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not damaged, so nothing advises deleting it."""
    monkeypatch.setattr(result_cache, "_BUSY_SECONDS", 0.01)
    (tmp_path / FILE_NAME).write_bytes(whole())
    with closing(ResultCache.open(tmp_path, SCOPE)) as results:
        results.add(key_of(50), LINE, 1, reply_of(50))
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute(lock)
            with pytest.raises(CacheError, match="locked") as caught:
                results.flush()
            other.execute("ROLLBACK")
    assert not isinstance(caught.value, CacheDamaged)


def test_a_database_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    """It is not damaged either."""
    (tmp_path / FILE_NAME).write_bytes(whole())
    with closing(open_database(tmp_path)) as database:
        database.execute("PRAGMA query_only = ON")
        results = ResultCache(tmp_path, database, SCOPE)
        assert results.find(key_of(0), LINE, 1) == reply_of(0)
        results.add(key_of(50), LINE, 1, reply_of(50))
        with pytest.raises(CacheError, match="readonly") as caught:
            results.flush()
    assert not isinstance(caught.value, CacheDamaged)
