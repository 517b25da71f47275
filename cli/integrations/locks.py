"""Locks between the processes of a user on one machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(address: str) -> Iterator[None]:
    """Hold the lock of a socket's folder."""
    with (Path(address).parent / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def private_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter, made if need be; raises PermissionError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} must be a folder of this user alone, of mode 700")
    return folder
