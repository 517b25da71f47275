"""State of an interrupted `submit`, from which the next one resumes the upload.

Each submission has a small file in the user's cache folder, which is removed when the batch has
been created. It does not contain the API key, because the folder may be backed up.
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

from tidemill.offline.console.terminal import log

from ..api.server import Server

# The server deletes incomplete uploads after about this time.
_MAX_AGE_SECONDS = 20 * 3600


@dataclass(slots=True)
class SubmissionState:
    """State of a submission; `nonce` seeds its idempotency key."""

    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    upload_id: str | None = None
    file_id: str | None = None
    begun_at: float = field(default_factory=time.time)

    def idempotency_key(self, fields: Mapping[str, Any]) -> str:
        """Return the idempotency key for a batch of these fields."""
        text = json.dumps([self.nonce, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class StateFile:
    """The locked file of a `SubmissionState`; without a file, the state is not saved."""

    def __init__(self, file: IO[str] | None, path: Path | None) -> None:
        self._file = file
        self._path = path
        self.state = _read(file) or SubmissionState()

    def save(self) -> None:
        """Write the state to the file."""
        if self._file is None:
            return
        with suppress(OSError):
            self._file.seek(0)
            self._file.truncate()
            json.dump(asdict(self.state), self._file)
            self._file.flush()

    def reset(self) -> None:
        """Start over, because the server no longer has the upload."""
        self.state = SubmissionState()
        self.save()

    def remove(self) -> None:
        """Remove the file after the batch has been created."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
        self._file = None


@contextmanager
def open_state_file(server: Server, path: Path | None) -> Iterator[StateFile]:
    """Open the state file of a submission; `path` is None for a stream.

    The state is not saved without a writable cache, or while another command submits the same file.
    """
    place = None if path is None else _folder() / f"{_name_of(server, path)}.json"
    file = None if place is None else _open_locked(place)
    try:
        yield StateFile(file, place if file is not None else None)
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
        log(f"warning: {place} cannot be written ({exc.strerror}): this upload cannot be resumed")
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _read(file: IO[str] | None) -> SubmissionState | None:
    if file is None:
        return None
    try:
        state = SubmissionState(**json.load(file))
        is_young = 0 <= time.time() - state.begun_at < _MAX_AGE_SECONDS
    except (OSError, ValueError, TypeError):
        return None
    return state if is_young else None
