"""Data folder of a server: its lock file and the layout of its contents."""

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
    """A data folder that cannot be used; the message is for the operator."""


class FolderLocked(FolderRefused):
    """A data folder that another server has locked."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Paths of a data folder: files, uploads in progress, and work of running batches."""

    root: Path

    @property
    def database(self) -> Path:
        """The file of all tables."""
        return self.root / "tidemill.sqlite3"

    @property
    def files(self) -> Path:
        """The folder of uploaded files and of results."""
        return self.root / "files"

    @property
    def incoming(self) -> Path:
        """The folder of bytes that are still being received."""
        return self.root / "incoming"

    @property
    def work(self) -> Path:
        """The folder of inputs and rows of running batches."""
        return self.root / "work"

    @property
    def uploads(self) -> Path:
        """The folder of parts of multipart uploads."""
        return self.root / "uploads"

    def parts_path(self, upload_id: str) -> Path:
        """Return the folder of the parts of an upload."""
        return self.uploads / upload_id

    def file(self, file_id: str) -> Path:
        """Return the path of a file's bytes."""
        return self.files / file_id

    def work_path(self, batch_id: str) -> Path:
        """Return the folder of a batch's work."""
        return self.work / batch_id

    def rows_of(self, batch_id: str) -> Path:
        """Return the path of the finished rows of a running batch."""
        return self.work_path(batch_id) / "rows"


@contextmanager
def lock_folder(root: Path) -> Iterator[Folder]:
    """Create the folder if needed and lock it; raises FolderRefused, FolderLocked."""
    folder = Folder(root)
    try:
        for path in (root, folder.files, folder.uploads, folder.work):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise FolderRefused(f"cannot create the data folder {root}: {exc.strerror}") from exc
    try:
        _acquire_lock(lock, root)
        # Partial uploads of an earlier server.
        shutil.rmtree(folder.incoming, ignore_errors=True)
        folder.incoming.mkdir(mode=0o700, exist_ok=True)
        yield folder
    finally:
        os.close(lock)


def _acquire_lock(lock: int, root: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "?"
        raise FolderLocked(
            f"{root} is in use by another server (process {owner}): stop it, or use another folder"
        ) from None
    except OSError as exc:
        raise FolderRefused(f"cannot lock the data folder {root}: {exc.strerror}") from exc
    os.truncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def is_full(exc: BaseException) -> bool:
    """Say whether a write failed for lack of space, on the disk or by quota."""
    if isinstance(exc, sqlite3.Error):
        return getattr(exc, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(exc, OSError) and exc.errno in _FULL


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
