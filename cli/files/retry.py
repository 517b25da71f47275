"""Failed rows run again in their places: new files grow beside the old ones and then replace them.

Until the last row is there the old files stay as they were, so a kill at any moment loses no row:
the new files are a prefix of the whole, and the next resume goes on behind it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from cli.files.output import LocalFile
from cli.files.resume import Kept, find_kept
from cli.files.spill import Spill, spill_path
from cli.files.writing import Files, FinishedRows, Merging, Row, SpilledRows
from engine.batchfile.lines import RawLine
from engine.batchfile.rows import parse_row_head

_GROWING, _COMPLETE = ".retry", ".retried"
_BUFFER_BYTES = 2**20


def is_retry_begun(output: Path) -> bool:
    """Say whether a retry of this output was cut off, so that a resume must go on with it."""
    return _beside(output).exists()


def settle_retry(output: Path, errors: Path | None) -> None:
    """Let the error file take its place too, where a retry ended when only the output had."""
    if errors is None or not (complete := _beside(errors, _COMPLETE)).exists():
        return
    if is_retry_begun(output):
        complete.replace(_beside(errors))
    else:
        _take_place(complete, errors, only_if_rows=True)


def retry_files(output: Path, errors: Path | None) -> list[Path]:
    """Return where a retry would lie: nothing that a run which starts over leaves there."""
    paths = [path for path in (output, errors) if path is not None]
    growing = [_beside(path, suffix) for path in paths for suffix in (_GROWING, _COMPLETE)]
    return [*growing, spill_path(_beside(output))]


class Retrying:
    """Runs the lines whose row is a failure, and those without one; a `Writing`.

    `old` is what stands in the files at `output` and `errors`, which the caller has locked.
    `spilled` has what an earlier run has spilled of lines behind those.
    """

    def __init__(
        self,
        output: Path,
        errors: Path | None,
        old: Kept,
        spilled: Spill,
        lines: Callable[[], Iterator[RawLine]],
        *,
        stack: ExitStack,
    ) -> None:
        self._paths = [output] if errors is None else [output, errors]
        self._new = find_kept(lines(), [_beside(path) for path in self._paths])
        opened = [_RetryFile(path) for path in self._paths]
        for file in opened:
            stack.callback(file.close)
        self._files = Files(*opened)
        self._spilled = spilled
        self.spill = Spill(spill_path(_beside(output)))
        self.spill.load(lines(), self._new.num_rows)
        self._finished: list[FinishedRows] = [
            _OldRows(output, old, self._new.num_rows, stack),
            SpilledRows(self.spill),
            SpilledRows(spilled),
        ]
        self._merging = Merging(self._files, self._new.num_rows, self._finished)
        own = self.spill.spilled
        written = self._new.num_rows
        earlier = [place for place in spilled.spilled if place >= written and place not in own]
        num_copied = old.ok.count(1, self._new.num_rows) + len(earlier)
        self.num_kept = self._new.num_rows + num_copied + len(own)
        self.num_kept_ok = (
            self._new.num_ok + num_copied + sum(row.is_success for row in own.values())
        )
        self._places = frozenset((*own, *earlier))
        self.created = old.created if self._new.created is None else self._new.created

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return the lines without a good row."""
        old_rows = self._finished[0]
        for place, raw in enumerate(lines):
            is_finished = place in self._places or place in old_rows
            if place >= self._new.num_rows and not is_finished:
                yield raw

    def begin(self) -> None:
        """Cut the new files behind what is there."""
        self._files.begin(self._new.cuts)
        self._merging.copy()

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows of lines that were run, each behind the old rows of the lines before it."""
        self._merging.write(rows)

    def finish(self) -> None:
        """Copy the old rows behind the last, then put the new files in the place of the old."""
        self._merging.copy()
        self._files.finish()
        output, *errors = self._paths
        # In this order, which `settle_retry` knows: all is written where the last name says so.
        for path in errors:
            _beside(path).replace(_beside(path, _COMPLETE))
        _take_place(_beside(output), output)
        for path in errors:
            _take_place(_beside(path, _COMPLETE), path, only_if_rows=True)
        self.spill.remove()
        self._spilled.remove()

    def how_to_go_on(self) -> str:
        """Say that nothing of what was there is lost."""
        return self._files.output.how_to_go_on() + self.spill.words()


class _OldRows:
    """The good rows of the old output that the new one does not have yet, as `FinishedRows`."""

    def __init__(self, path: Path, old: Kept, num_new: int, stack: ExitStack) -> None:
        self._ok = old.ok
        self._rows = self._read(path, old, num_new, stack)

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and place < len(self._ok) and self._ok[place] == 1

    def take(self, place: int) -> Row:
        """Return the next of them, which is that of the line at this place."""
        del place
        return next(self._rows), True

    @staticmethod
    def _read(path: Path, old: Kept, num_new: int, stack: ExitStack) -> Iterator[bytes]:
        # Opened when the first row is asked for: there may be none.
        file = stack.enter_context(path.open("rb", buffering=_BUFFER_BYTES))
        num_there = old.ok.count(1, 0, num_new)
        while file.tell() < old.cuts[0]:
            row = file.readline()
            if parse_row_head(row).status_code != 200:
                continue
            if num_there:
                num_there -= 1
            else:
                yield row


class _RetryFile(LocalFile):
    """The new rows of a file that stays as it was until they are all there."""

    def __init__(self, old: Path) -> None:
        super().__init__(_beside(old))
        self._old = old

    def finish(self) -> None:
        """Make the rows outlive a power cut: those that they replace will be gone."""
        super().finish()
        os.fsync(self._fd)

    def how_to_go_on(self) -> str:
        """Say how to run the rest."""
        return (
            f"Until all is done {self._old} stays as it was; the same command with --resume goes "
            "on with the retry"
        )


def _beside(path: Path, suffix: str = _GROWING) -> Path:
    target = Path(os.path.realpath(path))
    return target.with_name(target.name + suffix)


def _take_place(new: Path, old: Path, *, only_if_rows: bool = False) -> None:
    """Put the new file in the place of the old one; with `only_if_rows` an empty one is removed."""
    target = Path(os.path.realpath(old))
    if target.exists():
        shutil.copymode(target, new)
    new.replace(target)
    if only_if_rows and not target.stat().st_size:
        target.unlink()
