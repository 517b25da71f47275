"""The folder of a server: who holds it, and where each thing lies in it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FolderRefused(Exception):
    """A folder that a server cannot have; the message is for whoever started it."""


class FolderHeld(FolderRefused):
    """A folder that another server has."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where files, what is being received, and work in flight lie."""

    root: Path

    @property
    def database(self) -> Path:
        """The file of all tables."""
        return self.root / "tidemill.sqlite3"

    @property
    def files(self) -> Path:
        """What clients have uploaded, and the results that they may fetch."""
        return self.root / "files"

    @property
    def incoming(self) -> Path:
        """What is being received, and is nothing yet."""
        return self.root / "incoming"

    @property
    def work(self) -> Path:
        """What batches need that have not ended."""
        return self.root / "work"

    @property
    def uploads(self) -> Path:
        """The parts of files that come in parts."""
        return self.root / "uploads"

    def parts_of(self, upload_id: str) -> Path:
        """Return where the parts of an upload lie."""
        return self.uploads / upload_id

    def file(self, file_id: str) -> Path:
        """Return where the bytes of a file lie."""
        return self.files / file_id

    def work_of(self, batch_id: str) -> Path:
        """Return where the work of a batch lies."""
        return self.work / batch_id

    def rows_of(self, batch_id: str) -> Path:
        """Return where the finished rows of a batch lie that has not ended."""
        return self.work_of(batch_id) / "rows"


@contextmanager
def held(root: Path) -> Iterator[Folder]:
    """Make a folder where there is none, and hold it alone; raises FolderRefused, FolderHeld."""
    folder = Folder(root)
    try:
        for path in (root, folder.files, folder.uploads, folder.work):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise FolderRefused(f"{root} cannot be used for files: {exc.strerror}") from exc
    try:
        _take(lock, root)
        # What another server was receiving when it ended.
        shutil.rmtree(folder.incoming, ignore_errors=True)
        folder.incoming.mkdir(mode=0o700, exist_ok=True)
        yield folder
    finally:
        os.close(lock)


def _take(lock: int, root: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "?"
        raise FolderHeld(
            f"{root} is held by another server (process {owner}): end it, or name another folder"
        ) from None
    except OSError as exc:
        raise FolderRefused(f"{root} cannot be held alone: {exc.strerror}") from exc
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def is_full(exc: BaseException) -> bool:
    """Say whether there is no room for what was to be written, by the disk or by a quota."""
    if isinstance(exc, sqlite3.Error):
        return getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(exc, OSError) and exc.errno in _FULL


def sync_folder(path: Path) -> None:
    """Make durable which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
