"""Input sources: a path, standard input, a pipe or a URL as an open, seekable file."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tidemill.batch.file.formats import FileFormat

from ..console.errors import BadInput, InputChanged, Refused
from ..console.signals import interruptible
from ..console.terminal import log
from ..extras import require_extras
from .http_transfer import RETRY_DELAYS_SECONDS, download
from .paths import STANDARD_STREAM, display_name, is_regular_or_new, is_remote, is_url
from .s3_object import S3Object, is_s3

_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Source:
    """An input that can be read repeatedly.

    `created` (Unix seconds) is the same for each run of the same local file or object, so that rows
    are reproducible. `form` is its format if that is known beforehand. A local file raises
    InputChanged when it is modified; `changed` detects changes that are visible only at the end.
    """

    file: IO[bytes]
    name: str
    created: int
    files: tuple[SteadyFile, ...] = ()
    form: FileFormat | None = None

    def check(self) -> None:
        """Raise InputChanged if a file was modified since it was opened."""
        for file in self.files:
            file.check()

    def changed(self) -> str | None:
        """Return a description of a file's change; None if it is unchanged or gone."""
        return next(filter(None, (file.changed() for file in self.files)), None)


class SteadyFile(io.FileIO):
    """A file that is checked for modification after each block is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self.opened = os.fstat(self.fileno())

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        """Read a block; raises InputChanged if the file was modified since it was opened."""
        count = super().readinto(buffer)
        self.check()
        return count

    def check(self) -> None:
        """Raise InputChanged if the file was modified since it was opened."""
        if words := self._written_to():
            raise InputChanged(
                f"{words} while it was read: run it again when no process is writing to it"
            )

    def changed(self) -> str | None:
        """Return a description of the file's change: modified or replaced."""
        if words := self._written_to():
            return f"{words} during the run; the rows belong to its earlier content"
        with suppress(OSError):
            if not os.path.samestat(self._path.stat(), self.opened):
                return (
                    f"{self._path} was replaced during the run; the rows belong to the earlier file"
                )
        return None

    def _written_to(self) -> str | None:
        now, then = os.fstat(self.fileno()), self.opened
        if now.st_size != then.st_size:
            return f"{self._path} has changed (from {then.st_size:,} to {now.st_size:,} bytes)"
        return f"{self._path} has changed" if now.st_mtime_ns != then.st_mtime_ns else None


@contextmanager
def open_source(
    name: str, *, tmp_dir: Path | None, delays: tuple[float, ...] = RETRY_DELAYS_SECONDS
) -> Iterator[Source]:
    """Open a path in place; copy a pipe, standard input or a URL to a temporary file first.

    Raises CliError if the input cannot be read.
    """
    shown = display_name(name, "standard input")
    path = Path(name)
    if name != STANDARD_STREAM and not is_remote(name) and is_regular_or_new(path):
        try:
            steady = SteadyFile(path)
        except OSError as exc:
            raise Refused(f"the input {name} cannot be read: {exc.strerror}") from exc
        with io.BufferedReader(steady, _BUFFER_BYTES) as file:
            yield Source(file, shown, int(steady.opened.st_mtime), (steady,))
        return
    log(f"reading {shown}")
    if is_s3(name):
        require_extras(name, "cloud")
        # Imported late: boto3 is slow to load.
        from .s3_transfer import open_object

        with open_object(S3Object.parse(name), tmp_dir) as (copy, modified):
            yield Source(copy, shown, modified)
        return
    started = int(time.time())
    with _spooled(name, shown, tmp_dir, delays) as spool:
        yield Source(spool, shown, started)


def _spooled(name: str, shown: str, tmp_dir: Path | None, delays: tuple[float, ...]) -> IO[bytes]:
    """Copy the whole input to an unnamed temporary file and rewind it."""
    spool: IO[bytes] | None = None
    try:
        spool = tempfile.TemporaryFile(dir=tmp_dir, buffering=_BUFFER_BYTES)  # noqa: SIM115 - given
        _copy(name, spool, delays)
        spool.seek(0)
    except BaseException as exc:
        if spool is not None:
            discard(spool)
        if isinstance(exc, OSError):
            raise BadInput(
                f"copying {shown} to {tmp_dir or tempfile.gettempdir()} failed: "
                f"{exc.strerror or exc}. Pass --output-tmp-dir to use another folder"
            ) from exc
        raise
    return spool


def temporary_file(stack: ExitStack, folder: Path | None, buffering: int = -1) -> IO[bytes]:
    """Return a temporary file that is discarded when the stack closes."""
    file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=buffering)  # noqa: SIM115
    stack.callback(discard, file)
    return file


def discard(copy: IO[bytes]) -> None:
    """Close a temporary file; if the disk is full, closing it tries to write its buffer again."""
    with suppress(OSError):
        copy.close()


def _copy(name: str, spool: IO[bytes], delays: tuple[float, ...]) -> None:
    if is_url(name):
        download(name, spool, delays=delays)
    elif name == STANDARD_STREAM:
        interruptible(lambda: shutil.copyfileobj(sys.stdin.buffer, spool, _BUFFER_BYTES))
    else:
        interruptible(lambda: _copy_pipe(Path(name), spool))


def _copy_pipe(path: Path, spool: IO[bytes]) -> None:
    with path.open("rb") as pipe:
        shutil.copyfileobj(pipe, spool, _BUFFER_BYTES)
