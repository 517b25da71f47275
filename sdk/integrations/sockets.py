"""Unix sockets between a user's processes on one machine: addresses, a lock, and frames."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tidemill.engine_process.frames import Frame, receive_frame

_MAX_BYTES: Final = 100
"""Limit for socket paths; Linux allows 107 bytes, macOS 103."""
_BACKLOG: Final = 64


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


class Wire:
    """Frames over a connected socket: one thread receives them, and one at a time sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, frame: bytes) -> None:
        """Send an encoded frame; raises OSError if the connection has ended."""
        self._connection.sendall(frame)

    def receive(self) -> Frame | None:
        """Return the next frame, or None at the end; raises FrameError or OSError."""
        return receive_frame(self._read)

    def shut_down(self) -> None:
        """End the connection for both processes and for the thread that receives."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, which wakes the thread that receives."""
        self.shut_down()
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        """Return this many bytes, or fewer at the end."""
        data = b""
        while missing := num_bytes - len(data):
            more = self._connection.recv(missing, socket.MSG_WAITALL)
            if not more:
                break
            data += more
        return data


def listen(address: str) -> socket.socket:
    """Return a socket that processes can connect to at this address."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str) -> Wire:
    """Return a connection; raises OSError if nothing listens at this address."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return Wire(connection)
