"""What was found out once and is remembered here, by the digest of all that it follows from.

A fact lies in a file of its own under the user's cache folder. Whatever is wrong with that folder
or file, the fact is just found out again: nothing here raises, and nothing is ever unpickled.
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

from engine.sources import digest_of

VARIABLE = "TIDEMILL_CACHE"
OFF = "off"
# A fact that nobody asked for so long is forgotten; its model or its versions are gone.
KEPT_SECONDS = 90 * 24 * 3600

_DIGEST_BYTES = 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path | None:
    """Return where this machine's user keeps what can be made again, or None to keep nothing.

    `TIDEMILL_CACHE` names it, or says `off`; else it is `tidemill` in XDG_CACHE_HOME or ~/.cache.
    """
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    if named:
        try:
            return Path(named).absolute()
        except FileNotFoundError:  # it is relative, and the working folder is gone
            return None
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - raises nothing without a home
    return base / "tidemill" if base.is_absolute() else None


@dataclass(frozen=True, slots=True)
class Fact:
    """Something of a `kind` that is the same whenever all that `digest` was made of is."""

    kind: str
    digest: str

    @classmethod
    def of(cls, kind: str, *causes: str | bytes) -> Self:
        """Return the fact that follows from these causes, in this order, and from our sources."""
        digest = blake2b(digest_size=_DIGEST_BYTES)
        for cause in (sources_digest(), kind, *causes):
            data = cause.encode(errors="surrogatepass") if isinstance(cause, str) else cause
            digest.update(b"%d " % len(data))
            digest.update(data)
        return cls(kind, digest.hexdigest())

    def recall(self) -> bytes | None:
        """Return what was remembered, or None; a file that is torn or not ours is as none."""
        path = self._path()
        if path is None:
            return None
        try:
            with open(path, "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or (
                    status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS
                ):
                    return None
                seal, data = file.read(2 * _DIGEST_BYTES), file.read()
        except OSError:
            return None
        if seal != self._seal(data):
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def remember(self, data: bytes) -> None:
        """Keep what `recall` shall return, whole or not at all; does nothing where it cannot."""
        path = self._path()
        if path is None:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget_old(path.parent)
            handle, written = tempfile.mkstemp(dir=path.parent)
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 - a handle has no path
                    file.write(self._seal(data) + data)
                Path(written).replace(path)
            except BaseException:
                Path(written).unlink()
                raise

    def _path(self) -> Path | None:
        folder = cache_folder()
        return folder and folder / "remembered" / f"{self.kind}-{self.digest}"

    def _seal(self, data: bytes) -> bytes:
        """Return what tells a whole file of this fact from any other."""
        return (
            blake2b(data, digest_size=_DIGEST_BYTES, key=self.digest.encode()).hexdigest().encode()
        )


@cache
def sources_digest() -> str:
    """Return what is another text whenever a source file of the engine is another one."""
    return digest_of(Path(__file__).parent)


def versions_of(*packages: str) -> str:
    """Return which versions of these packages are installed, without importing them."""
    return " ".join(f"{package}={_version_of(package)}" for package in packages)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; one that is a pipe would else be waited for until somebody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _forget_old(folder: Path) -> None:
    oldest = time.time() - KEPT_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):  # another process forgets, too, or it is another user's
            if path.stat().st_mtime < oldest:
                path.unlink()
