"""What an interrupted `submit` of a file has done so far, so that the next one goes on from there.

One small file a submission in the user's cache folder, gone when the batch is made. It names no
key: the folder may be read by backups.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from cli.api.server import Server
from cli.terminal import say

# Uploads that nobody completes are removed about then.
_MAX_AGE_SECONDS = 20 * 3600


@dataclass(slots=True)
class Begun:
    """How far a submission is; `nonce` is what its idempotency key is made of."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    upload_id: str | None = None
    file_id: str | None = None
    begun_at: float = field(default_factory=time.time)

    def idempotency_key(self, fields: Mapping[str, Any]) -> str:
        """Return the key for a batch of these fields: the same when the same is asked again."""
        text = json.dumps([self.nonce, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Notes:
    """Where a `Begun` is written down; without a file it is forgotten at the end."""

    def __init__(self, file: IO[str] | None, path: Path | None) -> None:
        self._file = file
        self._path = path
        self.begun = _read(file) or Begun()

    def save(self) -> None:
        """Write down what has been done."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            json.dump(asdict(self.begun), self._file)
            self._file.flush()

    def begin_anew(self) -> None:
        """Forget what has been done: the server no longer knows of it."""
        self.begun = Begun()
        self.save()

    def forget(self) -> None:
        """Remove what was written down: the batch is made."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
        self._file = None


@contextmanager
def notes_of(server: Server, path: Path | None) -> Iterator[Notes]:
    """Yield the notes on the submission of a file as it stands now; None for a stream.

    Where they cannot be kept, or another command is at the same file, there are none.
    """
    place = None if path is None else _folder() / f"{_name_of(server, path)}.json"
    file = None if place is None else _open_locked(place)
    try:
        yield Notes(file, place if file is not None else None)
    finally:
        if file is not None:
            with suppress(OSError):
                file.close()


def _folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "tidemill" / "submissions"


def _name_of(server: Server, path: Path) -> str:
    found = path.stat()
    parts = [server.url, server.key, os.path.realpath(path), found.st_size, found.st_mtime_ns]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open_locked(place: Path) -> IO[str] | None:
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.fdopen(os.open(place, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    except OSError as exc:
        say(f"warning: {place} cannot be written ({exc.strerror}): a killed upload will not go on")
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _read(file: IO[str] | None) -> Begun | None:
    if file is None:
        return None
    try:
        begun = Begun(**json.load(file))
        is_young = 0 <= time.time() - begun.begun_at < _MAX_AGE_SECONDS
    except (OSError, ValueError, TypeError):
        return None
    return begun if is_young else None
