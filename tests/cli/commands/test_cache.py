"""`tidemill cache`, typed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli import place
from tests.emulators import Emulator
from tidemill.batch.result_cache import FILE_NAME, ResultCache
from tidemill.batch.result_key import VERSION, Scope
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.aws.objects.result_store import ResultStore
from tidemill.handler.aws.sync import Aws


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with results of two models."""
    for name, count in (("small", 2), ("large", 3)):
        with closing(ResultCache.open(tmp_path, Scope(name.encode(), name))) as cache:
            for number in range(count):
                cache.add(b"%d" % number, "x", 1, b"y" * 500_000)
    return tmp_path


def typed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run a cache command; return its exit status and output."""
    return place.typed(capsys, "cache", *map(str, arguments))


def test_results_are_listed_counted_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By model, or all of them."""
    status, table, _ = typed(capsys, "list", folder)
    cells = [line.split() for line in table.splitlines()]
    assert status == 0
    assert [(row[0], row[-1]) for row in cells[1:]] == [("3", "large"), ("2", "small")]
    assert "5 results of 2 models, 2.5 MB of replies" in typed(capsys, "stats", folder)[1]
    assert "0 results removed" in typed(capsys, "remove", folder, "--older-than", 1)[2]
    assert "2 results removed" in typed(capsys, "remove", folder, "--model", "small")[2]
    assert "3 results removed" in typed(capsys, "remove", folder)[2]
    assert "does not contain results" in typed(capsys, "list", folder)[2]


def test_a_folder_without_results_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid database, or a folder in an unsupported store, is also reported."""
    assert typed(capsys, "list", tmp_path)[0] == 2
    (tmp_path / FILE_NAME).write_bytes(b"something else" * 1_000)
    status, _, stderr = typed(capsys, "stats", tmp_path)
    assert (status, "file is not a database" in stderr) == (1, True)
    assert typed(capsys, "list", "gs://bucket/x")[0] == 2


def test_results_of_a_bucket_are_listed_counted_and_removed(
    ministack: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts are per model; other objects under the prefix are ignored."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    aws, bucket = Aws(ministack.client), Bucket(ministack.create().bucket)
    for name, count in (("./small", 2), ("large", 3)):
        scope = Scope(name.encode(), name)
        with closing(ResultStore(aws.run, bucket, "kept/", scope, 2**30)) as store:
            for number in range(count):
                store.add(b"%016d" % number, "x", 1, b"y" * 500_000)
    aws.run(bucket.put("kept/notes.txt", b"of another user"))
    aws.run(bucket.put("kept/a/00ff/b.1", b"of another user"))
    where = f"s3://{bucket.name}/kept"
    status, table, _ = typed(capsys, "list", where)
    cells = [line.split() for line in table.splitlines()]
    assert status == 0
    assert {(row[0], row[-1]) for row in cells[1:]} == {("3", "large"), ("2", "./small")}
    assert "5 results of 2 models, 2.5 MB of replies" in typed(capsys, "stats", where)[1]
    assert "0 results removed" in typed(capsys, "remove", where, "--older-than", 1)[2]
    assert "2 results removed" in typed(capsys, "remove", where, "--model", "./small")[2]
    assert "3 results removed" in typed(capsys, "remove", where)[2]
    assert "does not contain results" in typed(capsys, "list", where)[2]
    assert aws.run(bucket.list_keys("kept/")) == ["kept/a/00ff/b.1", "kept/notes.txt"]
    status, _, stderr = typed(capsys, "list", "s3://no-such-bucket-of-ours/kept")
    assert (status, "cannot be read" in stderr) == (1, True)


@pytest.mark.parametrize("action", ["list", "stats", "remove"])
@pytest.mark.parametrize("version", [1, VERSION])
def test_a_database_with_other_tables_is_reported(
    tmp_path: Path, action: str, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It belongs to another program, and is not changed."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        database.execute("CREATE TABLE results (used INTEGER)")
        database.execute("INSERT INTO results VALUES (1)")
        database.execute(f"PRAGMA user_version = {version}")
        database.commit()
    status, _, stderr = typed(capsys, action, tmp_path)
    assert (status, "is another program's database, with the table 'results'" in stderr) == (
        1,
        True,
    )
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        assert database.execute("SELECT used FROM results").fetchall() == [(1,)]
