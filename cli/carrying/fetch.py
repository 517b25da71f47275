"""Results to files of this machine: under a temporary name first, going on after a cut."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import httpx

from cli.api.client import Client
from cli.api.http import fault_of, may_pass, retry_after
from cli.api.objects import Batch
from cli.api.patience import LONG_SECONDS, Patience
from cli.carrying.bytes_bar import Advance, bytes_shown
from cli.errors import CliError, OutputLost, Refused, ServerRefused
from cli.files.paths import is_regular_or_new
from cli.terminal import say

STANDARD_OUTPUT = "-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Content(Protocol):
    """Bytes that never change and can be read from anywhere on."""

    @property
    def id(self) -> str:
        """Return what tells them from all others."""

    @property
    def num_bytes(self) -> int:
        """Return how many there are."""

    def open(self, start: int) -> AbstractContextManager[Iterator[bytes]]:
        """Open them from `start` on; raises Interrupted for what may pass."""


class Interrupted(Exception):
    """Bytes did not come; another try may go better, after `asked_seconds` if that is known."""

    def __init__(self, fault: str, asked_seconds: float | None = None) -> None:
        super().__init__(fault)
        self.asked_seconds = asked_seconds


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file of the API; each opening gets an address of its own, which is signed for a while."""

    client: Client
    id: str
    num_bytes: int

    @contextmanager
    def open(self, start: int) -> Iterator[Iterator[bytes]]:
        """Open the bytes from `start` on."""
        try:
            with self.client.open_content(self.id, start) as response:
                _check(response, start)
                # In no chunks of ours: what has come before a break is kept.
                yield response.iter_bytes()
        except httpx.TransportError as exc:
            raise Interrupted(fault_of(exc)) from exc


def _check(response: httpx.Response, start: int) -> None:
    words = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    if response.is_error:
        # An address that has expired is another one at the next try.
        if response.status_code == 403 or may_pass(response):
            raise Interrupted(words, retry_after(response))
        raise ServerRefused(f"the storage does not give the results: {words}")
    if start and response.status_code != 206:
        raise ServerRefused(f"the storage does not go on at byte {start:,}: {words}")


def check_target(name: str | None, *, force: bool) -> None:
    """Raise Refused for a place where results cannot go; None and `-` can always be."""
    if name is None or name == STANDARD_OUTPUT:
        return
    path = Path(name)
    folder = path.parent
    if path.is_dir():
        raise Refused(f"{path} is a directory: name a file")
    # A device or a pipe would be replaced by a file, for everybody.
    if not is_regular_or_new(path):
        raise Refused(f"{path} is no ordinary file: name one, or - for standard output")
    if not folder.is_dir():
        raise Refused(f"{path} is in a folder that does not exist: {folder}")
    if not os.access(folder, os.W_OK):
        raise Refused(f"{path} may not be written: look at the rights of {folder}")
    if path.exists() and not force:
        raise Refused(f"{path} is there already: name another file, or give --force")


def fetch_results(
    client: Client, batch: Batch, output: str | None, errors: str | None, *, force: bool
) -> dict[str, str | None]:
    """Fetch the files of a batch that has any; return what was written for each kind.

    A kind whose name is None is left out, and so is one that the batch has no row of.
    """
    saved: dict[str, str | None] = {"output": None, "errors": None}
    kinds = (("output", batch.output_file_id, output), ("errors", batch.error_file_id, errors))
    for kind, file_id, name in kinds:
        if file_id is None or name is None:
            continue
        file = client.file(file_id)
        fetch(FileContent(client, file.id, file.num_bytes), name, force=force)
        saved[kind] = name
    return saved


def fetch(content: Content, name: str, *, force: bool) -> None:
    """Write all of the bytes to a path, which appears only when they are all there, or to `-`."""
    if name == STANDARD_OUTPUT:
        _copy(content, sys.stdout.buffer, 0, "standard output")
        with _told(Path("standard output")):
            sys.stdout.buffer.flush()
        return
    path = Path(name)
    # The same name at another try, so that it goes on; another one for another file's bytes.
    part = path.with_name(f".{path.name}.{content.id[-8:]}.part")
    with _opened(part, path) as file:
        start = min(file.seek(0, os.SEEK_END), content.num_bytes)
        file.truncate(start)
        file.seek(start)
        if start:
            say(f"going on with {part} at byte {start:,}")
        _copy(content, file, start, str(path))
        with _told(path):
            os.fsync(file.fileno())
            check_target(name, force=force)
            part.replace(path)
    say(f"{content.num_bytes:,} bytes in {path}")


@contextmanager
def _opened(part: Path, path: Path) -> Iterator[IO[bytes]]:
    with _told(path):
        file = os.fdopen(
            os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b", buffering=0
        )
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise Refused(f"another command is fetching {path} just now") from exc
        yield file


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say in words why a file cannot be written."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            words = f"the disk of {path} is full: make room, then give the same command"
        else:
            words = f"{path} cannot be written: {exc.strerror}"
        raise OutputLost(words) from exc


def _copy(content: Content, into: IO[bytes], start: int, name: str) -> None:
    patience = Patience(LONG_SECONDS)
    with bytes_shown(f"fetching {name}", content.num_bytes, start) as show:
        while start < content.num_bytes:
            before = start
            try:
                with content.open(start) as chunks:
                    for chunk in chunks:
                        _write(chunk, into, Path(name), show)
                        start += len(chunk)
                fault, asked = "the connection ended too early", None
            except Interrupted as exc:
                fault, asked = str(exc), exc.asked_seconds
            if start > before:
                patience.reset()
            if start < content.num_bytes:
                patience.bear(
                    f"{name} stops at byte {start:,} of {content.num_bytes:,}: {fault}", asked
                )
    if start > content.num_bytes:
        raise CliError(f"{name} has {start:,} bytes, and {content.num_bytes:,} were promised")


def _write(chunk: bytes, into: IO[bytes], path: Path, show: Advance) -> None:
    with _told(path):
        view = memoryview(chunk)
        while view:
            view = view[into.write(view) :]
    show(len(chunk))
