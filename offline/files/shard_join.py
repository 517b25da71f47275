"""Join of shards: the rows of all shards of an output in one file, each exactly once.

The rows are copied to a file next to the output, which is renamed to the output once all of them
are on disk. If the process ends earlier, there is no output.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidemill.batch.file.rows import row_id_of

from ..console.errors import BadInput, Refused
from ..console.terminal import log
from .input_file import InputFile
from .kept_rows import RowReader, index_of
from .output import LocalFile
from .paths import check_paths, is_path
from .row_settings import RowSettings, joined_settings, settings_path
from .shard_files import (
    ShardFiles,
    check_same_settings,
    check_shards,
    find_shards,
    locked,
)
from .shard_mark import ShardMark, new_digest

_COPIED_BYTES: Final = 2**20
_GROWING: Final = ".joining"


@dataclass(frozen=True, slots=True)
class Joined:
    """Numbers of joined shards and rows."""

    num_shards: int
    num_rows: int
    num_errors: int


class LineCheck:
    """Compares the rows of shards, in order, with the lines of the whole input."""

    def __init__(self, requests: InputFile, count: int) -> None:
        self._name = requests.name
        # The size determines each shard's byte range, though not its lines.
        self._num_bytes = requests.num_bytes
        self._count = count
        self._lines = requests.placed_lines()
        self._next = next(self._lines, None)
        self.num_errors = 0

    def check(self, files: ShardFiles) -> None:
        """Raise BadInput unless the next shard's files contain the rows of the next lines."""
        _, end = files.shard.byte_range(self._num_bytes)
        with ExitStack() as stack:
            readers = [
                RowReader(path, stack.enter_context(path.open("rb")))
                for path in files.paths
                if path.exists()
            ]
            while self._next is not None and self._next_start < end:
                raw, _ = self._next
                index = index_of(row_id_of(raw.digest), readers)
                if index is None:
                    raise BadInput(
                        f"line {raw.number} of {self._name} has no row at its place in "
                        f"{' or '.join(map(str, files.paths))}: run {files.shard} with --resume"
                    )
                self.num_errors += readers[index].pop().status_code != 200
                self._next = next(self._lines, None)
            for reader in readers:
                if reader.head is not None:
                    raise BadInput(
                        f"row {reader.num_rows + 1} of {reader.path} does not match a line of "
                        f"{files.shard} of {self._name}"
                    )

    @property
    def _next_start(self) -> int:
        assert self._next is not None
        raw, start = self._next
        return 0 if raw.number == 1 else start  # before its byte order mark


class _JoinedFile(LocalFile):
    """File that grows next to the output and is renamed to it at the end."""

    def __init__(self, whole: Path) -> None:
        super().__init__(_growing_path(whole))
        self._whole = Path(os.path.realpath(whole))
        self.num_rows = 0

    def append(self, path: Path) -> str:
        """Copy all rows of a file, if it exists; return their digest."""
        digest = new_digest()
        if not path.exists():
            return digest.hexdigest()
        end = b"\n"
        with path.open("rb", buffering=0) as rows:
            while data := rows.read(_COPIED_BYTES):
                self.write(data)
                digest.update(data)
                self.num_rows += data.count(b"\n")
                end = data[-1:]
        if end != b"\n":
            raise BadInput(f"the last row of {path} is incomplete: run its shard with --resume")
        return digest.hexdigest()

    def finish(self) -> None:
        """Flush the rows to disk (fsync)."""
        super().finish()
        os.fsync(self._fd)

    def place(self, *, only_if_rows: bool = False) -> None:
        """Rename it to the output; with `only_if_rows`, remove it if it is empty."""
        if only_if_rows and self.is_empty:
            self._whole.unlink(missing_ok=True)
            return
        if self._whole.exists():
            shutil.copymode(self._whole, self.path)
        self.path.replace(self._whole)
        _sync_folder(self._whole.parent)

    def close(self) -> None:
        """Unlock the file; remove it unless it has become the output."""
        if self._is_in_place():
            self.path.unlink()
        super().close()

    def resume_hint(self) -> str:
        """Return how to continue."""
        return "The shards are unchanged: join them again"


def _growing_path(whole: Path) -> Path:
    target = Path(os.path.realpath(whole))
    return target.with_name(target.name + _GROWING)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # not supported by every file system
            os.fsync(fd)
    finally:
        os.close(fd)


def check_outputs(
    output_file: str, error_file: str | None, *, input_file: str | None, force: bool
) -> None:
    """Raise Refused for an output that cannot be written, or exists and `force` is not set."""
    if not is_path(output_file):
        raise Refused("the output must be a file: pass the -o of the shards' runs")
    check_paths(input_file, output_file, error_file)
    refuse_existing(Path(output_file), force=force)
    if error_file is not None:
        may_replace = force or _was_killed(Path(output_file))
        refuse_existing(Path(error_file), force=may_replace)


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise Refused for an existing file, unless `force` is set."""
    if path.exists() and not force:
        raise Refused(f"{path} already exists: pass --force to overwrite it")


def _was_killed(output: Path) -> bool:
    """Return whether a join was killed before the output was in its place.

    The error file may have been: nothing refers to it.
    """
    return _growing_path(output).exists() and not output.exists()


def join_shards(
    output: Path,
    errors: Path | None,
    *,
    count: int | None = None,
    requests: InputFile | None = None,
    force: bool = False,
    remove: bool = False,
    allow_other_settings: bool = False,
) -> Joined:
    """Write the rows of all shards to the output, and count them; raises CliError.

    Completeness of each shard is checked by its mark, or by comparing it with the lines of
    `requests`. With `remove`, the shards are removed once the output is on disk.
    """
    shards = find_shards(output, errors, count)
    marks = check_shards(shards, output, by_marks=requests is None)
    settings = [each.settings() for each in shards]
    if not allow_other_settings:
        check_same_settings(output, shards, settings)
    check = None if requests is None else LineCheck(requests, len(shards))
    wholes = [output] if errors is None else [output, errors]
    may_replace = [force, force or _was_killed(output)]
    with ExitStack() as stack:
        files = _open_files(wholes, stack)
        num_rows = [
            _append(files, each, marks[place] if check is None else check)
            for place, each in enumerate(shards)
        ]
        for file in files:
            file.finish()
        for whole, is_forced in zip(wholes, may_replace, strict=False):
            refuse_existing(whole, force=is_forced)
        _save_settings(output, joined_settings(zip(settings, num_rows, strict=True)))
        # The output comes last: if it exists, everything is complete.
        for file in reversed(files):
            file.place(only_if_rows=file is not files[0])
    num_errors = sum(mark.num_errors for mark in marks) if check is None else check.num_errors
    if remove:
        for each in shards:
            each.remove()
    return Joined(len(shards), sum(num_rows), num_errors)


def _save_settings(output: Path, found: RowSettings | None) -> None:
    """Save the settings of joined rows next to them, for a retry and for a table's card."""
    path = settings_path(output)
    try:
        if found is None:
            path.unlink(missing_ok=True)
        else:
            found.save(path)
    except OSError as exc:
        log(f"note: the settings of the rows cannot be written to {path} ({exc.strerror})")


def _open_files(wholes: Sequence[Path], stack: ExitStack) -> list[_JoinedFile]:
    """Open the new files; raises Refused while a run is writing an output that they replace."""
    for whole in wholes:
        if whole.exists():
            stack.enter_context(locked(whole))
    files = []
    for whole in wholes:
        file = _JoinedFile(whole)
        stack.callback(file.close)
        file.start(0)
        files.append(file)
    return files


def _append(files: Sequence[_JoinedFile], shard: ShardFiles, proof: ShardMark | LineCheck) -> int:
    """Copy the rows of a shard and count them; raises CliError if they do not match its lines."""
    num_before = sum(file.num_rows for file in files)
    with locked(shard.output):
        shard.check_ended()
        if isinstance(proof, LineCheck):
            proof.check(shard)
        digests = [file.append(path) for file, path in zip(files, shard.paths, strict=True)]
        num_rows = sum(file.num_rows for file in files) - num_before
        if isinstance(proof, ShardMark) and (proof, proof.num_rows) != (
            shard.load_mark(),
            num_rows,
        ):
            raise BadInput(f"{shard.output} changed after its run ended")
        if isinstance(proof, ShardMark) and proof.digests not in {None, tuple(digests)}:
            raise BadInput(
                f"{shard.output} changed after its run ended, or was damaged by copying: copy it "
                "again, or run its shard with --force"
            )
        return num_rows
