"""Disk cache: stores results across runs, keyed by a digest of all their inputs.

Each entry is a file in the user's cache folder. If the folder or a file is unusable, the lookup is
a miss and the result is computed again: nothing here raises, and nothing is unpickled.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Self


def folder_digest(folder: Path) -> str:
    """Return a digest of all Python sources in a folder: their paths and bytes."""
    digest = blake2b(digest_size=6)
    for path in sorted(folder.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


CACHE_VARIABLE = "TIDEMILL_CACHE"
OFF = "off"
# Older unused entries are deleted; their models or versions are probably gone.
MAX_AGE_SECONDS = 90 * 24 * 3600

_DIGEST_BYTES = 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return the user's cache folder, or None if caching is off.

    `TIDEMILL_CACHE` is its path, or `off`; the default is `tidemill` in XDG_CACHE_HOME or ~/.cache.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named == OFF:
        return None
    if named:
        try:
            return Path(named).absolute()
        except FileNotFoundError:  # it is relative, and the working folder is gone
            return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - raises nothing without a home
    return base / "tidemill" if base.is_absolute() else None


def _entries_folder() -> Path | None:
    folder = cache_folder()
    return folder and folder / "remembered"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Cache entry of a `kind`, keyed by the digest of its inputs."""

    kind: str
    digest: str

    @classmethod
    def from_inputs(cls, kind: str, *inputs: str | bytes) -> Self:
        """Return the entry keyed by these inputs, in this order, and by the engine's sources."""
        digest = blake2b(digest_size=_DIGEST_BYTES)
        for value in (sources_digest(), kind, *inputs):
            data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
            digest.update(b"%d " % len(data))
            digest.update(data)
        return cls(kind, digest.hexdigest())

    def load(self) -> bytes | None:
        """Return the saved data, or None on a miss; a partial or another user's file is a miss."""
        sealed = self.load_sealed()
        return None if sealed is None else sealed[2 * _DIGEST_BYTES :]

    def load_sealed(self) -> bytes | None:
        """Return the saved data after its checksum, for `save_sealed`; None on a miss."""
        path = self._path()
        if path is None:
            return None
        try:
            with open(path, "rb", opener=_open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or (
                    status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS
                ):
                    return None
                sealed = file.read()
        except OSError:
            return None
        if not self._is_whole(sealed):
            return None
        with suppress(OSError):
            os.utime(path)
        return sealed

    def save(self, data: bytes) -> None:
        """Save the data atomically for `load`; do nothing if that fails."""
        self.save_sealed(self._checksum(data) + data)

    def save_sealed(self, sealed: bytes) -> bool:
        """Save the result of `load_sealed`, maybe from another machine; False if it is damaged."""
        if not self._is_whole(sealed):
            return False
        path = self._path()
        if path is None:
            return True
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _delete_old(path.parent)
            handle, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 - a handle has no path
                    file.write(sealed)
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink()
                raise
        return True

    def _path(self) -> Path | None:
        folder = _entries_folder()
        return folder and folder / f"{self.kind}-{self.digest}"

    def _is_whole(self, sealed: bytes) -> bool:
        return sealed[: 2 * _DIGEST_BYTES] == self._checksum(sealed[2 * _DIGEST_BYTES :])

    def _checksum(self, data: bytes) -> bytes:
        """Return the checksum that marks a complete file of this entry."""
        return (
            blake2b(data, digest_size=_DIGEST_BYTES, key=self.digest.encode()).hexdigest().encode()
        )


def recent_entries(kind: str, since: float) -> list[CacheEntry]:
    """Return the entries of a kind that were loaded or saved since a time in Unix seconds."""
    folder, prefix = _entries_folder(), f"{kind}-"
    try:
        paths = list(folder.glob(f"{prefix}*")) if folder else []
        names = [path.name for path in paths if path.stat().st_mtime >= since]
    except OSError:
        return []
    return [CacheEntry(kind, name.removeprefix(prefix)) for name in names]


@cache
def sources_digest() -> str:
    """Return the digest of the engine's sources, part of every entry's key."""
    return folder_digest(Path(__file__).parents[1])


def package_versions(*packages: str) -> str:
    """Return the installed versions of these packages, without importing them."""
    return " ".join(f"{package}={_package_version(package)}" for package in packages)


@cache  # finding and parsing the metadata of one takes milliseconds
def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: opening a pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _delete_old(folder: Path) -> None:
    oldest = time.time() - MAX_AGE_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):  # another process deleted it first, or it is another user's
            if path.stat().st_mtime < oldest:
                path.unlink()
