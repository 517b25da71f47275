"""Outputs of rows: a local file, standard output, a pipe or device, or an upload to a URL."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from ..console.errors import OutputLost, Refused, TransferFailed
from ..console.terminal import amount
from .http_transfer import RETRY_DELAYS_SECONDS, upload
from .paths import STANDARD_STREAM, display_name, is_regular_or_new, is_url, spool_path
from .row_settings import settings_path_of
from .s3_object import S3Object, is_s3

_OPEN_TRIES = 10
_START_OF_ROWS = b'{"id":"batch_req_'
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Output(Protocol):
    """Writes rows in order. `start` precedes the first `write`, `finish` follows the last.

    `close` is always called; before `start` nothing existing has changed.
    """

    def start(self, keep_bytes: int) -> None:
        """Truncate existing content to its first `keep_bytes` bytes."""

    def write(self, rows: bytes) -> None:
        """Write complete rows to the operating system; raises OutputLost."""

    def finish(self) -> None:
        """Make sure that all rows have arrived."""

    def resume_hint(self) -> str:
        """Return where the rows are after a stop, and how to resume."""

    @property
    def spool_path(self) -> Path | None:
        """Return the path of the spool of out-of-order rows; None if the run cannot be resumed."""

    def close(self) -> None:
        """Release all resources."""


def open_output(
    name: str, *, tmp_dir: Path | None, delays: tuple[float, ...] = RETRY_DELAYS_SECONDS
) -> Output:
    """Open the output of `-o`; raises Refused if it is not writable or locked."""
    if name == STANDARD_STREAM:
        return StandardOutput()
    if is_url(name):
        return UploadOutput(name, tmp_dir, partial(upload, name, delays=delays))
    if is_s3(name):
        # Imported late: boto3 is slow to load.
        from .s3_transfer import upload_object

        return UploadOutput(name, tmp_dir, partial(upload_object, S3Object.parse(name)))
    path = Path(name)
    if is_regular_or_new(path):
        return LocalFile(path, tmp_dir=tmp_dir)
    return Device(path)


class LocalFile:
    """A file that grows during the run, locked against a second run.

    With `only_if_rows`, it is removed at the end if it is empty.
    """

    def __init__(
        self, path: Path, *, tmp_dir: Path | None = None, only_if_rows: bool = False
    ) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._tmp_dir = tmp_dir
        self._only_if_rows = only_if_rows
        self._is_started = False
        self._fd, self._is_new = _open_locked(self._target, path)

    @property
    def is_empty(self) -> bool:
        """Return whether the file is empty."""
        return not os.fstat(self._fd).st_size

    @property
    def holds_rows(self) -> bool:
        """Return whether the file starts like an output of a run."""
        return os.pread(self._fd, len(_START_OF_ROWS), 0) == _START_OF_ROWS

    @property
    def spool_path(self) -> Path:
        """Return the path of the spool, next to the output."""
        return spool_path(self.path)

    def start(self, keep_bytes: int) -> None:
        """Truncate the file to `keep_bytes`; the next row is written there."""
        self._check_place()
        os.ftruncate(self._fd, keep_bytes)
        os.lseek(self._fd, keep_bytes, os.SEEK_SET)
        self._is_started = True

    def write(self, rows: bytes) -> None:
        """Write the rows; raises OutputLost immediately if the file was moved or removed."""
        try:
            _write_all(self._fd, rows)
        except OSError as exc:
            if exc.errno in _FULL:
                why = f"the disk of {self.path} is full ({exc.strerror})"
                raise OutputLost(f"{why}. Free some space. {self.resume_hint()}") from exc
            why = f"{self.path} cannot be written ({exc.strerror})"
            raise OutputLost(f"{why}. {self.resume_hint()}") from exc
        self._check_place()

    def finish(self) -> None:
        """Check once more that the file is at its path."""
        self._check_place()

    def resume_hint(self) -> str:
        """Return how to resume."""
        return (
            f"The finished rows are in {self.path}; to keep them and run the rest, run the same "
            "command with --resume"
        )

    def close(self) -> None:
        """Unlock the file; remove it if it is new and has no rows."""
        leftover = self._is_new if not self._is_started else self._only_if_rows
        if leftover and os.fstat(self._fd).st_size == 0 and self._is_in_place():
            self._target.unlink()
        os.close(self._fd)

    def _is_in_place(self) -> bool:
        try:
            found = self._target.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._fd))

    def _check_place(self) -> None:
        if self._is_in_place():
            return
        if os.fstat(self._fd).st_nlink:
            raise OutputLost(
                f"{self.path} was moved during the run. Move it back; to keep its rows and run the "
                "rest, then run the same command with --resume"
            )
        raise OutputLost(f"{self.path} was removed during the run. {self._rescue()}")

    def _rescue(self) -> str:
        """Copy the rows of the removed file, which is readable while it is open, to a new file."""
        if not os.fstat(self._fd).st_size:
            return "It had no rows yet"
        try:
            with (
                os.fdopen(os.dup(self._fd), "rb") as lost,
                tempfile.NamedTemporaryFile(
                    dir=self._tmp_dir, prefix="tidemill-rows-", suffix=".jsonl", delete=False
                ) as saved,
            ):
                lost.seek(0)
                shutil.copyfileobj(lost, saved)
        except OSError:
            return "Its rows are lost"
        return (
            f"Its rows are now in {saved.name}; move them to {self.path}, then run the same "
            "command with --resume to keep them and run the rest"
        )


def _open_locked(target: Path, shown: Path) -> tuple[int, bool]:
    """Return a locked descriptor and whether the file is new; the file is never unlinked."""
    reason = f"another run is writing {shown}"
    for _ in range(_OPEN_TRIES):
        try:
            fd, is_new = _open_or_make(target)
        except FileNotFoundError:
            if not target.parent.is_dir():
                raise Refused(f"the folder of {shown} does not exist") from None
            # Another run has removed it, or the folder does not allow files, as /proc.
            reason = f"{shown} cannot be created: {target.parent} does not allow new files"
            continue
        except OSError as exc:
            raise Refused(f"{shown} cannot be written: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise Refused(reason) from None
        except OSError:
            # The file system does not support locks: run without one.
            return fd, is_new
        if os.fstat(fd).st_nlink:
            return fd, is_new
        os.close(fd)
    raise Refused(reason)


def _open_or_make(target: Path) -> tuple[int, bool]:
    try:
        return os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), True
    except FileExistsError:
        return os.open(target, os.O_RDWR | os.O_CLOEXEC), False


def _write_all(fd: int, rows: bytes) -> None:
    view = memoryview(rows)
    while view:
        view = view[os.write(fd, view) :]


class StandardOutput:
    """Rows on standard output; other output goes to standard error in the meantime."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def start(self, keep_bytes: int) -> None:
        """Do nothing: there is no existing content."""

    def write(self, rows: bytes) -> None:
        """Write the rows."""
        _write_to_stream(self._fd, rows, "standard output")

    def finish(self) -> None:
        """Do nothing: all rows are written."""

    spool_path = None

    def resume_hint(self) -> str:
        """Return that only a file can be resumed."""
        return (
            "The finished rows were written to standard output; only an output file can be resumed"
        )

    def close(self) -> None:
        """Restore standard output."""
        sys.stdout.flush()
        os.dup2(self._fd, 1)
        os.close(self._fd)


class Device:
    """Rows into a pipe or device by path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise Refused(f"{path} cannot be written: {exc.strerror}") from exc

    def start(self, keep_bytes: int) -> None:
        """Do nothing: there is no existing content."""

    def write(self, rows: bytes) -> None:
        """Write the rows."""
        _write_to_stream(self._fd, rows, str(self._path))

    def finish(self) -> None:
        """Do nothing: all rows are written."""

    spool_path = None

    def resume_hint(self) -> str:
        """Return that only a file can be resumed."""
        return f"The finished rows were written to {self._path}; only a regular file can be resumed"

    def close(self) -> None:
        """Close the pipe or device."""
        os.close(self._fd)


def _write_to_stream(fd: int, rows: bytes, name: str) -> None:
    try:
        _write_all(fd, rows)
    except BrokenPipeError:
        raise OutputLost(f"{name} was closed by its reader") from None
    except OSError as exc:
        raise OutputLost(f"{name} cannot be written ({exc.strerror})") from exc


class UploadOutput:
    """Rows collected in a temporary file and uploaded at the end."""

    def __init__(self, url: str, tmp_dir: Path | None, send: Callable[[IO[bytes]], None]) -> None:
        self._url = url
        self._send = send
        self._num_bytes = 0
        self._is_done = False
        try:
            self._file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115 - until `close`
                dir=tmp_dir, prefix="tidemill-rows-", suffix=".jsonl", delete=False, buffering=0
            )
        except OSError as exc:
            raise Refused(f"a temporary file cannot be created: {exc.strerror}") from exc

    @property
    def spool_path(self) -> Path:
        """Return the path of the spool, next to the temporary file, which can be resumed."""
        return spool_path(Path(self._file.name))

    def start(self, keep_bytes: int) -> None:
        """Do nothing: there is no existing content."""

    def write(self, rows: bytes) -> None:
        """Write the rows to the temporary file."""
        try:
            _write_all(self._file.fileno(), rows)
        except OSError as exc:
            why = f"{self._file.name} cannot be written ({exc.strerror})"
            raise OutputLost(f"{why}: pass --output-tmp-dir to use another folder") from exc
        self._num_bytes += len(rows)

    def finish(self) -> None:
        """Upload the rows; on failure they stay in the temporary file, which the error names."""
        try:
            self._send(self._file)
        except TransferFailed as exc:
            raise TransferFailed(f"{exc}. The rows are in {self._file.name}") from exc
        self._is_done = True

    def resume_hint(self) -> str:
        """Return where the rows are, and how to resume them as a local output."""
        return (
            f"Nothing was uploaded to {display_name(self._url)}; "
            f"{amount(self._num_bytes, 'byte')} of finished rows are in {self._file.name}; "
            f"to run the rest: -o {self._file.name} --resume"
        )

    def close(self) -> None:
        """Remove the temporary file unless it contains rows that were not uploaded."""
        self._file.close()
        if self._is_done or not self._num_bytes:
            Path(self._file.name).unlink(missing_ok=True)
            if not self.spool_path.exists():
                settings_path_of(self.spool_path).unlink(missing_ok=True)
