"""Cached facts: stored completely or not at all, and never confused with others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tidemill.engine.storage.disk_cache import (
    MAX_AGE_SECONDS,
    CacheEntry,
    cache_folder,
    package_versions,
)

FACT = CacheEntry.from_inputs("thing", "cause")
DATA = bytes(range(256)) * 9


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))


def cached_file() -> Path:
    """Return the one file in the cache."""
    folder = cache_folder()
    assert folder is not None
    [path] = (folder / "remembered").iterdir()
    return path


@pytest.mark.parametrize("data", [b"", DATA])
def test_saved_data_is_loaded(data: bytes) -> None:
    """The bytes are equal; before saving there is nothing to load."""
    assert FACT.load() is None
    FACT.save(data)
    assert FACT.load() == data
    FACT.save(data + b"again")
    assert FACT.load() == data + b"again"


def test_facts_differ_by_all_their_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by kind, by each cause, by where one cause ends, and by our sources."""
    given = [("thing", "cause"), ("thing", "causes"), ("other", "cause"), ("thing", "ca", "use")]
    facts = [CacheEntry.from_inputs(kind, *causes) for kind, *causes in given]
    monkeypatch.setattr(
        "tidemill.engine.storage.disk_cache.sources_digest", lambda: "other sources"
    )
    facts.append(CacheEntry.from_inputs("thing", "cause"))
    assert len({fact.digest for fact in facts}) == len(facts)
    facts[0].save(DATA)
    assert [fact.load() for fact in facts] == [DATA, None, None, None, None]


@pytest.mark.parametrize("length", [0, 10, 39, 40, 41, len(DATA)])
def test_a_truncated_file_is_ignored(length: int) -> None:
    """It holds for every cut; the file is then created again and is complete."""
    FACT.save(DATA)
    os.truncate(cached_file(), length)
    assert FACT.load() is None
    FACT.save(DATA)
    assert FACT.load() == DATA


def test_a_changed_byte_is_noticed() -> None:
    """Disks may corrupt bytes."""
    FACT.save(DATA)
    data = bytearray(cached_file().read_bytes())
    data[500] ^= 1
    cached_file().write_bytes(data)
    assert FACT.load() is None


def test_the_file_of_another_fact_is_ignored() -> None:
    """The file is complete but was written for another fact."""
    other = CacheEntry.from_inputs("thing", "another cause")
    other.save(DATA)
    cached_file().rename(cached_file().with_name(f"{FACT.kind}-{FACT.digest}"))
    assert FACT.load() is None


def test_a_file_that_others_may_write_is_ignored() -> None:
    """Its contents could come from any user."""
    FACT.save(DATA)
    assert cached_file().stat().st_mode & 0o077 == 0
    cached_file().chmod(0o666)
    assert FACT.load() is None


def test_a_file_of_another_user_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache folders are sometimes shared."""
    FACT.save(DATA)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert FACT.load() is None


def test_an_unusable_cache_folder_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file replaces the folder, a folder the file, or there is no home: nothing is logged."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "file"))
    FACT.save(DATA)
    assert FACT.load() is None
    (tmp_path / "cache/remembered" / f"{FACT.kind}-{FACT.digest}").mkdir(parents=True)
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    FACT.save(DATA)
    assert FACT.load() is None
    assert cached_file().is_dir()
    monkeypatch.delenv("TIDEMILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() is None
    FACT.save(DATA)
    assert FACT.load() is None


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variable has priority, then XDG's, then the home; one value turns the cache off."""
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("TIDEMILL_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.setenv("TIDEMILL_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/tidemill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/tidemill"


def test_unused_facts_expire() -> None:
    """They expire after a long time; loading a fact renews it."""
    used, old, new = (CacheEntry.from_inputs("thing", cause) for cause in ("used", "old", "new"))
    for fact in (used, old):
        fact.save(DATA)
    folder = cache_folder()
    assert folder is not None
    long_ago = time.time() - MAX_AGE_SECONDS - 60
    for path in (folder / "remembered").iterdir():
        os.utime(path, (long_ago, long_ago))
    assert used.load() == DATA
    new.save(DATA)
    assert [fact.load() for fact in (used, old, new)] == [DATA, None, DATA]


def test_a_file_that_cannot_be_removed_does_not_prevent_saving() -> None:
    """A shared folder contains other users' files, which only they can remove."""
    FACT.save(DATA)
    stays = cached_file().with_name("stays")
    stays.mkdir()  # not to be unlinked, not even by root
    os.utime(stays, (0, 0))
    another = CacheEntry.from_inputs("thing", "another cause")
    another.save(DATA)
    assert another.load() == DATA


def test_a_pipe_instead_of_a_file_is_ignored() -> None:
    """Loading does not wait for it: its creator may never write to it."""
    FACT.save(DATA)
    path = cached_file()
    path.unlink()
    os.mkfifo(path, 0o600)
    asking = threading.Thread(target=FACT.load, daemon=True)
    asking.start()
    asking.join(120)
    assert not asking.is_alive()
    assert FACT.load() is None


def test_a_deleted_working_folder_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name then has no meaning."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TIDEMILL_CACHE", "relative")
    FACT.save(DATA)
    assert FACT.load() is None


def test_versions_are_read_without_an_import() -> None:
    """A package that is not installed is reported as such."""
    assert package_versions("pytest", "no-such-package") == (
        f"pytest={pytest.__version__} no-such-package=none"
    )
