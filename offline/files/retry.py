"""Retry of failed rows: new files grow next to the old ones and replace them at the end.

The old files stay unchanged until the last row is written, so that a kill does not lose rows: the
new files are a prefix of the result, and the next resume continues there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import RowHead, parse_row_head

from ..console.errors import OutputLost
from .kept_rows import KeptRows, find_kept_rows
from .output import LocalFile
from .paths import spool_path
from .row_writer import OrderedRows, OutputFiles
from .spool import Row, Spool

_GROWING, _COMPLETE = ".retry", ".retried"
_BUFFER_BYTES = 2**20


def is_retry_started(output: Path) -> bool:
    """Return whether a retry of this output was interrupted, so that a resume continues it."""
    return _file_next_to(output).exists()


def finish_retry(output: Path, errors: Path | None) -> None:
    """Replace the error file of a retry that was killed after replacing the output."""
    if errors is None or not (complete := _file_next_to(errors, _COMPLETE)).exists():
        return
    if is_retry_started(output):
        complete.replace(_file_next_to(errors))
    else:
        _replace(complete, errors, only_if_rows=True)


def retry_files(output: Path, errors: Path | None) -> list[Path]:
    """Return the files of an earlier retry, which a new run removes."""
    paths = [path for path in (output, errors) if path is not None]
    growing = [_file_next_to(path, suffix) for path in paths for suffix in (_GROWING, _COMPLETE)]
    return [*growing, spool_path(_file_next_to(output))]


class RetryWriter(OrderedRows):
    """Runs lines whose row is missing or not `is_ok`; a `ResumableWriter`.

    `old` are the kept rows in `output` and `errors`, the locked `files`. `earlier` contains rows of
    later lines, spooled by an earlier run.
    """

    def __init__(
        self,
        files: OutputFiles,
        output: Path,
        errors: Path | None,
        old: KeptRows,
        earlier: Spool,
        *,
        lines: Callable[[], Iterator[RawLine]],
        is_ok: Callable[[RowHead], bool],
        stack: ExitStack,
    ) -> None:
        self._paths = [output] if errors is None else [output, errors]
        self._new = find_kept_rows(lines(), [_file_next_to(path) for path in self._paths])
        for path in self._paths:  # raises Refused before the model loads
            _RetryFile(path).close()
        self._stack = stack
        spool = Spool(spool_path(_file_next_to(output)), earlier.num_rows)
        stack.callback(spool.close)
        spool.load(lines(), self._new.num_rows)
        written = self._new.num_rows
        old_rows = _OldRows(output, old, is_ok, stack)
        super().__init__(files, self._new, spool, (old_rows, earlier))
        self._earlier = earlier
        later = [place for place in earlier.places if place >= written and place not in spool]
        num_copied = len(later) + sum(
            place >= written and place not in spool for place in old_rows.places
        )
        self.num_kept = written + num_copied + spool.num_waiting
        self.num_reused = 0
        self.num_kept_ok = self._new.num_ok + num_copied + spool.num_ok
        self.created = old.created if self._new.created is None else self._new.created

    def start(self) -> None:
        """Create the new files, or truncate them after their kept rows."""
        opened = [_RetryFile(path) for path in self._paths]
        for file in opened:
            self._stack.callback(file.close)
        self._files = OutputFiles(*opened)
        self._files.start(self._new.cuts)

    def finish(self) -> None:
        """Copy the remaining old rows, then replace the old files with the new ones.

        Raises RunIncomplete if a line has no row: the old files then stay.
        """
        self._write_rest()
        self._files.finish()
        output, *errors = self._paths
        # `finish_retry` relies on this order: the last rename marks all files as complete.
        for path in errors:
            _file_next_to(path).replace(_file_next_to(path, _COMPLETE))
        _replace(_file_next_to(output), output)
        for path in errors:
            _replace(_file_next_to(path, _COMPLETE), path, only_if_rows=True)
        self._spool.remove()
        self._earlier.remove()


class _OldRows:
    """Successful rows of the old output that the new one lacks, as `FinishedRows`."""

    def __init__(
        self,
        path: Path,
        old: KeptRows,
        is_ok: Callable[[RowHead], bool],
        stack: ExitStack,
    ) -> None:
        self._path = path
        self._ok = old.ok
        self._is_ok = is_ok
        self._rows = self._read(old.cuts[0], stack)

    @property
    def places(self) -> Iterator[int]:
        """Return the places of the successful rows, in order."""
        return (place for place, is_ok in enumerate(self._ok) if is_ok)

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and place < len(self._ok) and self._ok[place] == 1

    def pop(self, place: int) -> Row:
        """Return the row of the line at a place, skipping rows before it."""
        for found, row in self._rows:
            if found == place:
                return Row(row, is_success=True)
        raise OutputLost(f"{self._path} changed during the run")

    def _read(self, num_bytes: int, stack: ExitStack) -> Iterator[tuple[int, bytes]]:
        """Yield each successful row of the first `num_bytes` with its place."""
        # Opened lazily, because there may be no such row.
        file = stack.enter_context(self._path.open("rb", buffering=_BUFFER_BYTES))
        places = iter(self.places)
        while file.tell() < num_bytes:
            row = file.readline()
            if self._is_ok(parse_row_head(row)):
                yield next(places), row


class _RetryFile(LocalFile):
    """The new file of a retry; the old one stays until all rows are written."""

    def __init__(self, old: Path) -> None:
        super().__init__(_file_next_to(old))
        self._old = old

    def finish(self) -> None:
        """Flush the rows to disk (fsync), because they replace the old ones."""
        super().finish()
        os.fsync(self._fd)

    def resume_hint(self) -> str:
        """Return how to resume."""
        return (
            f"{self._old} stays unchanged until the retry is complete; to continue it, run the "
            "same command with --resume"
        )


def _file_next_to(path: Path, suffix: str = _GROWING) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + suffix)


def _replace(new: Path, old: Path, *, only_if_rows: bool = False) -> None:
    """Replace the old file with the new one; with `only_if_rows`, remove an empty one."""
    target = Path(os.path.realpath(old))
    if target.exists():
        shutil.copymode(target, new)
    new.replace(target)
    if only_if_rows and not target.stat().st_size:
        target.unlink()
