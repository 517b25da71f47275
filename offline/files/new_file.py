"""New file: written under a temporary name and renamed when complete, or standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..console.errors import OutputLost, Refused
from .paths import STANDARD_STREAM, check_paths, is_regular_or_new, is_remote
from .source import discard


def check_new_file(name: str, sources: Iterable[str], *, force: bool) -> None:
    """Raise Refused for a name that cannot be written, and for sources that cannot be read."""
    if not name or is_remote(name):
        raise Refused("-o must be a path, or - for standard output")
    for source in sources:
        check_paths(source, name, None)
    if name == STANDARD_STREAM:
        return
    path = Path(name)
    if not is_regular_or_new(path):
        raise Refused(f"{path} is not a regular file: choose another one, or - for standard output")
    if path.exists() and not force:
        raise Refused(f"{path} already exists: choose another file, or pass --force")


class NewFile:
    """A file that is being written; `write` raises OutputLost on failure."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Yield the file for a library that writes to it; raises OutputLost as `write` does."""
        with _write_errors(self._name):
            yield self._file

    def write(self, data: bytes) -> None:
        """Write all bytes."""
        with _write_errors(self._name):
            self._file.write(data)

    def flush(self) -> None:
        """Hand buffered bytes to the operating system."""
        with _write_errors(self._name):
            self._file.flush()


@contextmanager
def open_new_file(name: str) -> Iterator[NewFile]:
    """Open a file that appears at its path if the block ends without an error."""
    if name == STANDARD_STREAM:
        file = NewFile(sys.stdout.buffer, "standard output")
        yield file
        file.flush()
        return
    target = Path(os.path.realpath(name))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with _write_errors(name):
        stream = part.open("wb")
    try:
        file = NewFile(stream, name)
        yield file
        file.flush()
        with _write_errors(name):
            os.fsync(stream.fileno())  # the files that it was made of may be removed next
            part.replace(target)
    finally:
        discard(stream)
        part.unlink(missing_ok=True)


@contextmanager
def _write_errors(name: str) -> Iterator[None]:
    """Translate OSError to OutputLost."""
    try:
        yield
    except BrokenPipeError as exc:
        raise OutputLost(f"{name} was closed by its reader") from exc
    except OSError as exc:
        raise OutputLost(f"{name} cannot be written ({exc.strerror})") from exc
