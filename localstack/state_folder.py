"""State folder of a local cloud: locked by one process, recoverable after any kill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from localstack.ministack import free_port

_LOCK_SECONDS = 60.0
_SETTLE_SECONDS = 15.0
_POLL_SECONDS = 0.1


class StateRefused(Exception):
    """A state folder that cannot be resumed from; the message has the reason."""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """A locked folder, the port of its cloud, and the lock to be inherited.

    Addresses in it, such as those of queues, contain the port.
    """

    folder: Path
    port: int
    lock: int

    @contextmanager
    def deploying(self) -> Iterator[None]:
        """Suspend snapshots inside the block, and wait for a new one after it.

        If it is killed in between, the next start resumes from the earlier state. Raises
        StateRefused if nothing can be written.
        """
        mark, before = self.folder / "deploying", _snapshots(self.folder)
        mark.touch()
        yield
        mark.unlink()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while _snapshots(self.folder) == before:
            if time.monotonic() > deadline:
                raise StateRefused(
                    f"no snapshot was written to {self.folder}: is there space on its disk?"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def locked_state(
    folder: Path, port: int | None, notify: Callable[[str], None]
) -> Iterator[StateFolder]:
    """Lock a folder until the block is left, and recover it if a kill left it half written.

    Raises StateRefused if another cloud uses it, or it cannot be recovered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire_lock(lock, folder, notify)
        kept = _read_port(folder, port)
        _recover(folder, notify)
        yield StateFolder(folder, kept, lock)
    finally:
        os.close(lock)


def _acquire_lock(lock: int, folder: Path, notify: Callable[[str], None]) -> None:
    """Take the lock, which an emulator holds while it writes; wait for one that is ending."""
    deadline, is_notified = time.monotonic() + _LOCK_SECONDS, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_notified:
                notify(f"another cloud uses {folder}; waiting for it to end")
                is_notified = True
            if time.monotonic() >= deadline:
                raise StateRefused(f"another cloud uses {folder}: stop it first") from None
            time.sleep(_POLL_SECONDS)
        else:
            return


def _read_port(folder: Path, wanted: int | None) -> int:
    path = folder / "port"
    kept: int | None = None
    with suppress(FileNotFoundError, ValueError):
        kept = int(path.read_text(encoding="utf-8"))
    if kept is None:
        if _snapshots(folder):
            raise StateRefused(
                f"{path} does not contain the port of this cloud: write the port into it, or "
                f"remove {folder} to start from scratch"
            )
        kept = wanted or free_port()
        new = path.with_suffix(".new")
        new.write_text(str(kept), encoding="utf-8")
        new.replace(path)
    if wanted not in (None, kept):
        raise StateRefused(f"{folder} was created for port {kept}; it cannot be used with {wanted}")
    return kept


def _recover(folder: Path, notify: Callable[[str], None]) -> None:
    """Roll the folder back to its newest complete snapshot; raises StateRefused without one."""
    (folder / "deploying").unlink(missing_ok=True)
    shutil.rmtree(folder / "saving", ignore_errors=True)
    saved = _snapshots(folder)
    # An older Tidemill wrote directly into the folder.
    candidates = saved[::-1] or ([folder] if any(folder.glob("*.json")) else [])
    mistakes = [(path, _find_corruption(path)) for path in candidates]
    whole = next((path for path, mistake in mistakes if mistake is None), None)
    if mistakes and whole is None:
        raise StateRefused(
            f"{mistakes[0][1]}, and no older snapshot is intact: remove {folder} to start from "
            f"scratch; the objects of its bucket are in {folder / 's3'}"
        )
    if whole is not None and (mistake := mistakes[0][1]) is not None:
        notify(f"{mistake}; resuming from the snapshot of {_written_at(whole)}")
        for path in saved[saved.index(whole) + 1 :]:
            shutil.rmtree(path)
    if whole is None and (folder / "s3").exists():
        notify(f"the cloud in {folder} ended before it was ready: starting from scratch")
        shutil.rmtree(folder / "s3")


def _snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("saved-*"))


def _find_corruption(folder: Path) -> str | None:
    """Return the error in a snapshot, or None."""
    for path in sorted(folder.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return f"{path} is half written"
    return None


def _written_at(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M:%S")
