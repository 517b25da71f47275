"""Row writers: choose the lines to run, and append their rows after the kept ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from tidemill.batch.file.lines import RawLine

from .kept_rows import ROWS_PER_WRITE, KeptRows
from .output import Output
from .spill import Spill

_MAX_HELD_BYTES = 2**20

Row = tuple[bytes, bool]
"""A printed row, newline included, and whether it is a success."""


class RowWriter(Protocol):
    """Writes finished rows in line order."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, at most `ROWS_PER_WRITE` at once; raises OutputLost."""


class ResumableWriter(RowWriter, Protocol):
    """Writer of one run, resumed or not: `start` before the first row, `finish` after the last."""

    @property
    def num_kept(self) -> int:
        """Number of lines that are not run because they have a row."""

    @property
    def num_kept_ok(self) -> int:
        """Number of kept rows that are successful."""

    @property
    def created(self) -> int | None:
        """Timestamp of the kept replies, None without any."""

    @property
    def spill(self) -> Spill | None:
        """Spill file for rows out of order; None when there can be none."""

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return the input lines to run."""

    def start(self) -> None:
        """Prepare the files; before that they are unchanged."""

    def finish(self) -> None:
        """Make sure that all rows have arrived."""

    def resume_hint(self) -> str:
        """Return where the rows are after a stop, and how to resume."""


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Output files of a run: `output` for all rows, or `errors` for the failed ones."""

    output: Output
    errors: Output | None = None

    def start(self, cuts: Sequence[int]) -> None:
        """Truncate each file to its number of bytes in `cuts`."""
        for file, cut in zip(self._all, cuts, strict=True):
            file.start(cut)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, each with whether it is a success, in input order."""
        if self.errors is None:
            self.output.write(b"".join([row for row, _ in rows]))
            return
        if failed := b"".join([row for row, is_success in rows if not is_success]):
            self.errors.write(failed)
        if succeeded := b"".join([row for row, is_success in rows if is_success]):
            self.output.write(succeeded)

    def finish(self) -> None:
        """Make sure that all rows have arrived."""
        for file in self._all:
            file.finish()

    @property
    def _all(self) -> list[Output]:
        return [self.output] if self.errors is None else [self.output, self.errors]


class FinishedRows(Protocol):
    """Finished rows of lines that are not run again, by place of the line."""

    def __contains__(self, place: object) -> bool: ...

    def pop(self, place: int) -> Row:
        """Remove and return the row of a line; called in line order, once each."""


class RowMerger:
    """Merges new rows with the finished rows of the lines before them.

    `place` is the line of the next row to write.
    """

    def __init__(self, files: OutputFiles, place: int, finished: Sequence[FinishedRows]) -> None:
        self._files = files
        self._place = place
        self._finished = finished
        self._held: list[Row] = []
        self._held_bytes = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Write new rows, and the finished ones before and after them."""
        for row in rows:
            self._copy()
            self._hold(row)
        self.copy()

    def copy(self) -> None:
        """Write the finished rows that are next in order."""
        self._copy()
        self._flush()

    def _copy(self) -> None:
        while there := next((rows for rows in self._finished if self._place in rows), None):
            self._hold(there.pop(self._place))

    def _hold(self, row: Row) -> None:
        self._place += 1
        self._held.append(row)
        self._held_bytes += len(row[0])
        if len(self._held) == ROWS_PER_WRITE or self._held_bytes >= _MAX_HELD_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._files.write(self._held)
        self._held, self._held_bytes = [], 0


class SpilledRows:
    """Rows of an earlier run's spill file, as `FinishedRows`."""

    def __init__(self, spill: Spill) -> None:
        self._rows = spill.spilled

    def __contains__(self, place: object) -> bool:
        return place in self._rows

    def pop(self, place: int) -> Row:
        """Remove and return the row of a line."""
        spilled = self._rows.pop(place)
        return spilled.row, spilled.is_success


class AppendWriter:
    """Runs the lines after the kept rows; a `ResumableWriter`.

    `spill` keeps rows out of order, and those that it has loaded of an earlier run. `stale` are
    files of an older run, removed by `start`.
    """

    def __init__(
        self,
        files: OutputFiles,
        kept: KeptRows,
        spill: Spill | None = None,
        *,
        stale: Sequence[Path] = (),
    ) -> None:
        self._files = files
        self._kept = kept
        self._stale = stale
        self.spill = spill
        spilled = {} if spill is None else spill.spilled
        self.num_kept = kept.num_rows + len(spilled)
        self.num_kept_ok = kept.num_ok + sum(row.is_success for row in spilled.values())
        self.created = kept.created
        if kept.created is None and spill is not None:
            self.created = spill.created
        self._places = frozenset(spilled)
        finished = [SpilledRows(spill)] if spill is not None and spilled else []
        self._merger = RowMerger(files, kept.num_rows, finished)

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return the lines without a row."""
        behind = islice(lines, self._kept.num_rows, None)
        if not self._places:
            return behind
        numbered = enumerate(behind, start=self._kept.num_rows)
        return (raw for place, raw in numbered if place not in self._places)

    def start(self) -> None:
        """Truncate the files after the kept rows."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._files.start(self._kept.cuts)
        self._merger.copy()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows."""
        if self._places:
            self._merger.write(rows)
        else:
            self._files.write(rows)

    def finish(self) -> None:
        """Make sure that all rows have arrived."""
        self._merger.copy()
        if self.spill is not None:
            self.spill.remove()
        self._files.finish()

    def resume_hint(self) -> str:
        """Return the output's hint and the number of spilled rows."""
        words = self._files.output.resume_hint()
        return words if self.spill is None else words + self.spill.words()
