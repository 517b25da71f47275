"""Where rows go: a local file that grows, a stream, or a URL that gets all of them at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol

from cli.errors import OutputLost, Refused, TransferFailed
from cli.files.paths import STANDARD_STREAM, display_name, is_regular_or_new, is_url
from cli.files.spill import spill_path
from cli.files.transfer import RETRY_DELAYS_SECONDS, upload
from cli.terminal import amount

_OPEN_TRIES = 10
_START_OF_ROWS = b'{"id":"batch_req_'
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Output(Protocol):
    """Takes rows in order. `begin` comes before the first `write`, `finish` after the last.

    `close` is always called; without a `begin` before it, nothing that was there has changed.
    """

    def begin(self, keep_bytes: int) -> None:
        """Drop what was there but its first `keep_bytes` bytes."""

    def write(self, rows: bytes) -> None:
        """Hand complete rows to the operating system; raises OutputLost."""

    def finish(self) -> None:
        """Make sure that all rows have arrived where they were to go."""

    def how_to_go_on(self) -> str:
        """Say where the rows are after a stop, and how to run the rest."""

    @property
    def spill_path(self) -> Path | None:
        """Where finished rows that wait for their order may be kept; None where none can be."""

    def close(self) -> None:
        """Let go of everything that is held."""


def open_output(
    name: str, *, tmp_dir: Path | None, delays: tuple[float, ...] = RETRY_DELAYS_SECONDS
) -> Output:
    """Open what `-o` names; raises Refused when it cannot be written or another run holds it."""
    if name == STANDARD_STREAM:
        return StandardOutput()
    if is_url(name):
        return UploadOutput(name, tmp_dir, delays)
    path = Path(name)
    if is_regular_or_new(path):
        return LocalFile(path, tmp_dir=tmp_dir)
    return Device(path)


class LocalFile:
    """A file that grows while the job runs, locked against a second run.

    With `only_if_rows` it is removed at the end when it holds none.
    """

    def __init__(
        self, path: Path, *, tmp_dir: Path | None = None, only_if_rows: bool = False
    ) -> None:
        self.path = path
        self._target = Path(os.path.realpath(path))
        self._tmp_dir = tmp_dir
        self._only_if_rows = only_if_rows
        self._begun = False
        self._fd, self._is_new = _open_locked(self._target, path)

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to be lost by writing over it."""
        return not os.fstat(self._fd).st_size

    @property
    def holds_rows(self) -> bool:
        """Say whether it begins as an output of a run does."""
        return os.pread(self._fd, len(_START_OF_ROWS), 0) == _START_OF_ROWS

    @property
    def spill_path(self) -> Path:
        """Beside the file."""
        return spill_path(self.path)

    def begin(self, keep_bytes: int) -> None:
        """Cut the file after `keep_bytes` bytes; the next row goes there."""
        self._check_place()
        os.ftruncate(self._fd, keep_bytes)
        os.lseek(self._fd, keep_bytes, os.SEEK_SET)
        self._begun = True

    def write(self, rows: bytes) -> None:
        """Write the rows through; a file that is no longer at its path is an error at once."""
        try:
            _write_all(self._fd, rows)
        except OSError as exc:
            if exc.errno in _FULL:
                why = f"the disk of {self.path} is full ({exc.strerror})"
                raise OutputLost(f"{why}. Make room, then: {self.how_to_go_on()}") from exc
            why = f"{self.path} cannot be written ({exc.strerror})"
            raise OutputLost(f"{why}. {self.how_to_go_on()}") from exc
        self._check_place()

    def finish(self) -> None:
        """Look once more that the file is where it was."""
        self._check_place()

    def how_to_go_on(self) -> str:
        """Say how to run the rest."""
        return (
            f"The finished rows are in {self.path}; the same command with --resume keeps them "
            "and runs the rest"
        )

    def close(self) -> None:
        """Unlock the file; remove one that was made for this run and got nothing."""
        leftover = self._is_new if not self._begun else self._only_if_rows
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
                f"{self.path} was moved away while the job ran. Move it back, then: the same "
                "command with --resume keeps its rows and runs the rest"
            )
        raise OutputLost(f"{self.path} was removed while the job ran. {self._rescue()}")

    def _rescue(self) -> str:
        """Copy the rows of the removed file, which live as long as it is open, to another."""
        if not os.fstat(self._fd).st_size:
            return "It held no rows yet"
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
            f"Its rows are now in {saved.name}; move them to {self.path}, then: the same command "
            "with --resume keeps them and runs the rest"
        )


def _open_locked(target: Path, shown: Path) -> tuple[int, bool]:
    """Return the locked descriptor and whether the file is new; never one that was unlinked."""
    for _ in range(_OPEN_TRIES):
        try:
            fd, is_new = _open_or_make(target)
        except FileNotFoundError:
            if target.parent.is_dir():
                continue
            raise Refused(f"the folder of {shown} does not exist") from None
        except OSError as exc:
            raise Refused(f"{shown} may not be written: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise Refused(f"another run is writing {shown}") from None
        except OSError:
            # A file system without locks: better no lock than no run.
            return fd, is_new
        if os.fstat(fd).st_nlink:
            return fd, is_new
        os.close(fd)
    raise Refused(f"another run is writing {shown}")


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
    """Rows on standard output; whatever else prints there goes to standard error meanwhile."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def begin(self, keep_bytes: int) -> None:
        """Nothing was there."""

    def write(self, rows: bytes) -> None:
        """Write the rows through."""
        _write_to_stream(self._fd, rows, "standard output")

    def finish(self) -> None:
        """All is written."""

    spill_path = None

    def how_to_go_on(self) -> str:
        """Say that only a file can be resumed."""
        return "The finished rows went to standard output; only an output file can be resumed"

    def close(self) -> None:
        """Give standard output back."""
        sys.stdout.flush()
        os.dup2(self._fd, 1)
        os.close(self._fd)


class Device:
    """Rows into a pipe or a device that has a path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise Refused(f"{path} may not be written: {exc.strerror}") from exc

    def begin(self, keep_bytes: int) -> None:
        """Nothing was there."""

    def write(self, rows: bytes) -> None:
        """Write the rows through."""
        _write_to_stream(self._fd, rows, str(self._path))

    def finish(self) -> None:
        """All is written."""

    spill_path = None

    def how_to_go_on(self) -> str:
        """Say that only a file can be resumed."""
        return f"The finished rows went to {self._path}; only an ordinary file can be resumed"

    def close(self) -> None:
        """Close the pipe or device."""
        os.close(self._fd)


def _write_to_stream(fd: int, rows: bytes, name: str) -> None:
    try:
        _write_all(fd, rows)
    except BrokenPipeError:
        raise OutputLost(f"the reader of {name} went away") from None
    except OSError as exc:
        raise OutputLost(f"{name} cannot be written ({exc.strerror})") from exc


class UploadOutput:
    """Rows gathered in a temporary file, which one PUT carries away at the end."""

    def __init__(self, url: str, tmp_dir: Path | None, delays: tuple[float, ...]) -> None:
        self._url = url
        self._delays = delays
        self._num_bytes = 0
        self._is_done = False
        try:
            self._file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115 - until `close`
                dir=tmp_dir, prefix="tidemill-rows-", suffix=".jsonl", delete=False, buffering=0
            )
        except OSError as exc:
            raise Refused(f"no temporary file can be made: {exc.strerror}") from exc

    @property
    def spill_path(self) -> Path:
        """Beside the temporary file, which can be resumed as a local output."""
        return spill_path(Path(self._file.name))

    def begin(self, keep_bytes: int) -> None:
        """Nothing was there."""

    def write(self, rows: bytes) -> None:
        """Write the rows to the temporary file."""
        try:
            _write_all(self._file.fileno(), rows)
        except OSError as exc:
            why = f"{self._file.name} cannot be written ({exc.strerror})"
            raise OutputLost(f"{why}; --output-tmp-dir names another folder") from exc
        self._num_bytes += len(rows)

    def finish(self) -> None:
        """Upload; when that fails for good the rows stay and the error says where."""
        try:
            upload(self._url, self._file, delays=self._delays)
        except TransferFailed as exc:
            raise TransferFailed(f"{exc}. The rows are kept in {self._file.name}") from exc
        self._is_done = True

    def how_to_go_on(self) -> str:
        """Say where the rows are; they can be resumed as a local output."""
        return (
            f"Nothing was uploaded to {display_name(self._url)}; "
            f"{amount(self._num_bytes, 'byte')} of finished rows are kept in {self._file.name}; "
            f"to run the rest: -o {self._file.name} --resume"
        )

    def close(self) -> None:
        """Remove the temporary file unless it holds rows that are nowhere else."""
        self._file.close()
        if self._is_done or not self._num_bytes:
            Path(self._file.name).unlink(missing_ok=True)
