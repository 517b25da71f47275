"""Unix sockets between a user's processes on one machine: their addresses and a lock."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

_MAX_BYTES: Final = 100
"""Limit for socket paths; Linux allows 107 bytes, macOS 103."""


def socket_address(*key: object) -> str:
    """Return the address for a key, in a folder that only this user can access.

    Raises PermissionError if another user owns that folder.
    """
    name = f"tidemill-{os.getuid()}"
    digest = blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=12).hexdigest()
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder / digest)) > _MAX_BYTES:  # as in a YARN container
        folder = Path("/tmp") / name  # noqa: S108 - a folder of this user alone
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} must be a folder with mode 700 owned by this user")
    return str(folder / digest)


@contextmanager
def locked(address: str) -> Iterator[None]:
    """Hold the lock on the folder of a socket."""
    with (Path(address).parent / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def shut_down(connection: Connection) -> None:
    """End a connection for both processes and for the threads that wait for its messages."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
