"""Resumable downloads: content is written to a partial file, which is renamed when complete."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx

from tidemill.net.backoff import retry_after
from tidemill.offline.console.backoff import LONG_SECONDS, Backoff
from tidemill.offline.console.errors import CliError, OutputLost, Refused, ServerRefused
from tidemill.offline.console.progress_bar import Advance, byte_progress
from tidemill.offline.console.terminal import log
from tidemill.offline.files.paths import is_regular_or_new

from ..api.client import Client
from ..api.http import fault_of, is_transient
from ..api.objects import Batch

STANDARD_OUTPUT = "-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Content(Protocol):
    """Immutable content that can be read from any offset."""

    @property
    def id(self) -> str:
        """Return an ID that is unique to this content."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the content."""

    def open(self, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """Stream from `start` on; raises Interrupted for transient errors."""


class Interrupted(Exception):
    """A transient error; retry after `retry_after_seconds` if the server sent them."""

    def __init__(self, fault: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(fault)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file of the API; each `open` gets a new presigned URL."""

    client: Client
    id: str
    num_bytes: int

    @contextmanager
    def open(self, start: int) -> Iterator[Iterator[bytes]]:
        """Stream the bytes from `start` on."""
        try:
            with self.client.open_content(self.id, start) as response:
                _check(response, start)
                # No chunk size, so that all bytes received before a disconnect are saved.
                yield response.iter_bytes()
        except httpx.TransportError as exc:
            raise Interrupted(fault_of(exc)) from exc


def _check(response: httpx.Response, start: int) -> None:
    words = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    if response.is_error:
        # The next attempt gets a new URL if the presigned one has expired.
        if response.status_code == 403 or is_transient(response):
            raise Interrupted(words, retry_after(response.headers))
        raise ServerRefused(
            f"the results cannot be downloaded: storage returned {words}",
            status=response.status_code,
        )
    if start and response.status_code != 206:
        raise ServerRefused(
            f"the download cannot resume at byte {start:,}: storage returned {words}"
        )


def check_target(name: str | None, *, force: bool) -> None:
    """Raise Refused for a target that cannot be written; None and `-` always can."""
    if name is None or name == STANDARD_OUTPUT:
        return
    path = Path(name)
    folder = path.parent
    if path.is_dir():
        raise Refused(f"{path} is a directory: give the path of a file")
    # The final rename would replace a device or pipe with a file, for all users.
    if not is_regular_or_new(path):
        raise Refused(f"{path} is not a regular file: choose another one, or - for standard output")
    if not folder.is_dir():
        raise Refused(f"{path} is in a folder that does not exist: {folder}")
    if not os.access(folder, os.W_OK):
        raise Refused(f"{path} cannot be written: check the permissions of {folder}")
    if path.exists() and not force:
        raise Refused(f"{path} already exists: choose another file, or pass --force")


def fetch_results(
    client: Client, batch: Batch, names: Mapping[str, str | None], *, force: bool
) -> dict[str, str | None]:
    """Download the files of a batch to these names; return the path written for each kind.

    The kinds are `output`, `errors` and `table`. A kind is skipped if its name is None or the batch
    has no such file.
    """
    kinds = {"output": batch.output_file_id, "errors": batch.error_file_id}
    if batch.table_file_id is not None:
        kinds["table"] = batch.table_file_id
    saved: dict[str, str | None] = dict.fromkeys(kinds)
    for kind, file_id in kinds.items():
        if file_id is None or (name := names.get(kind)) is None:
            continue
        file = client.file(file_id)
        fetch(FileContent(client, file.id, file.num_bytes), name, force=force)
        saved[kind] = name
    return saved


def fetch(content: Content, name: str, *, force: bool) -> None:
    """Download content to `-` or to a path, which appears only when it is complete."""
    if name == STANDARD_OUTPUT:
        _copy(content, sys.stdout.buffer, 0, "standard output")
        with _write_errors(Path("standard output")):
            sys.stdout.buffer.flush()
        return
    path = Path(name)
    # The same partial file for the same content, so that a retry resumes.
    part = path.with_name(f".{path.name}.{content.id[-8:]}.part")
    with _open_part(part, path) as file:
        start = min(file.seek(0, os.SEEK_END), content.num_bytes)
        file.truncate(start)
        file.seek(start)
        if start:
            log(f"resuming {part} at byte {start:,}")
        _copy(content, file, start, str(path))
        with _write_errors(path):
            os.fsync(file.fileno())
            check_target(name, force=force)
            part.replace(path)
    log(f"{content.num_bytes:,} bytes in {path}")


def fetch_into(content: Content, file: IO[bytes], name: str) -> None:
    """Download content to an open file; errors and the progress bar call it `name`."""
    _copy(content, file, 0, name)


@contextmanager
def _open_part(part: Path, path: Path) -> Iterator[IO[bytes]]:
    with _write_errors(path):
        file = os.fdopen(
            os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0
        )
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise Refused(f"another command is currently downloading {path}") from exc
        yield file


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Translate OSError to OutputLost."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            words = f"the disk of {path} is full: free some space, then run the same command again"
        else:
            words = f"{path} cannot be written: {exc.strerror}"
        raise OutputLost(words) from exc


def _copy(content: Content, into: IO[bytes], start: int, name: str) -> None:
    backoff = Backoff(LONG_SECONDS)
    with byte_progress(f"fetching {name}", content.num_bytes, start) as show:
        while start < content.num_bytes:
            before = start
            try:
                with content.open(start) as chunks:
                    for chunk in chunks:
                        _write(chunk, into, Path(name), show)
                        start += len(chunk)
                fault, retry_seconds = "the connection was closed early", None
            except Interrupted as exc:
                fault, retry_seconds = str(exc), exc.retry_after_seconds
            if start > before:
                backoff.reset()
            if start < content.num_bytes:
                backoff.wait(
                    f"the download of {name} stopped at byte {start:,} of "
                    f"{content.num_bytes:,}: {fault}",
                    retry_seconds,
                )
    if start > content.num_bytes:
        raise CliError(
            f"{name} has {start:,} bytes instead of {content.num_bytes:,}: download it again"
        )


def _write(chunk: bytes, into: IO[bytes], path: Path, show: Advance) -> None:
    with _write_errors(path):
        view = memoryview(chunk)
        while view:
            view = view[into.write(view) :]
    show(len(chunk))
