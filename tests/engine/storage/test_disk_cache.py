"""What was found out once: kept whole or not at all, and never another's."""

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


def kept() -> Path:
    """Return the one file that is kept."""
    folder = cache_folder()
    assert folder is not None
    [path] = (folder / "remembered").iterdir()
    return path


@pytest.mark.parametrize("data", [b"", DATA])
def test_what_is_remembered_is_recalled(data: bytes) -> None:
    """Byte for byte; before it was remembered there is nothing."""
    assert FACT.load() is None
    FACT.save(data)
    assert FACT.load() == data
    FACT.save(data + b"anew")
    assert FACT.load() == data + b"anew"


def test_facts_are_told_apart_by_all_that_they_follow_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kind, by each cause, by where one ends and the next begins, and by our sources."""
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
def test_a_torn_file_is_none(length: int) -> None:
    """Wherever it was cut: it is made anew, and is whole then."""
    FACT.save(DATA)
    os.truncate(kept(), length)
    assert FACT.load() is None
    FACT.save(DATA)
    assert FACT.load() == DATA


def test_a_changed_byte_is_noticed() -> None:
    """Such as a disk may give."""
    FACT.save(DATA)
    data = bytearray(kept().read_bytes())
    data[500] ^= 1
    kept().write_bytes(data)
    assert FACT.load() is None


def test_another_facts_file_is_none() -> None:
    """A whole file under this one's name, written for something else."""
    other = CacheEntry.from_inputs("thing", "another cause")
    other.save(DATA)
    kept().rename(kept().with_name(f"{FACT.kind}-{FACT.digest}"))
    assert FACT.load() is None


def test_a_file_that_others_may_write_is_none() -> None:
    """What is in it would be anybody's word."""
    FACT.save(DATA)
    assert kept().stat().st_mode & 0o077 == 0
    kept().chmod(0o666)
    assert FACT.load() is None


def test_a_file_of_another_user_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of caches are shared at times."""
    FACT.save(DATA)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert FACT.load() is None


def test_where_nothing_can_be_kept_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in the folder's place, a folder in the file's place, no home: each without a word."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "file"))
    FACT.save(DATA)
    assert FACT.load() is None
    (tmp_path / "cache/remembered" / f"{FACT.kind}-{FACT.digest}").mkdir(parents=True)
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    FACT.save(DATA)
    assert FACT.load() is None
    assert kept().is_dir()
    monkeypatch.delenv("TIDEMILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() is None
    FACT.save(DATA)
    assert FACT.load() is None


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variable, then XDG's, then the home; and a word that turns it off."""
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("TIDEMILL_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.setenv("TIDEMILL_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/tidemill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/tidemill"


def test_what_nobody_asks_for_is_forgotten() -> None:
    """Long after; what is recalled is young again."""
    asked, old, new = (CacheEntry.from_inputs("thing", cause) for cause in ("asked", "old", "new"))
    for fact in (asked, old):
        fact.save(DATA)
    folder = cache_folder()
    assert folder is not None
    long_ago = time.time() - MAX_AGE_SECONDS - 60
    for path in (folder / "remembered").iterdir():
        os.utime(path, (long_ago, long_ago))
    assert asked.load() == DATA
    new.save(DATA)
    assert [fact.load() for fact in (asked, old, new)] == [DATA, None, DATA]


def test_what_cannot_be_forgotten_keeps_nothing_from_being_remembered() -> None:
    """In a shared folder lie others' files, which none but they can remove."""
    FACT.save(DATA)
    stays = kept().with_name("stays")
    stays.mkdir()  # not to be unlinked, not even by root
    os.utime(stays, (0, 0))
    another = CacheEntry.from_inputs("thing", "another cause")
    another.save(DATA)
    assert another.load() == DATA


def test_a_pipe_in_a_files_place_is_none() -> None:
    """It is not waited for: whoever made it may never write to it."""
    FACT.save(DATA)
    path = kept()
    path.unlink()
    os.mkfifo(path, 0o600)
    asking = threading.Thread(target=FACT.load, daemon=True)
    asking.start()
    asking.join(120)
    assert not asking.is_alive()
    assert FACT.load() is None


def test_a_working_folder_that_is_gone_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name means nothing then."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("TIDEMILL_CACHE", "relative")
    FACT.save(DATA)
    assert FACT.load() is None


def test_versions_are_told_without_an_import() -> None:
    """One that is not installed is told so."""
    assert package_versions("pytest", "no-such-package") == (
        f"pytest={pytest.__version__} no-such-package=none"
    )
