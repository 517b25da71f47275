"""Row writers: put rows into line order, and append them to the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final, Protocol

from tidemill.batch.file.rows import count_truncated

from ..console.errors import RunIncomplete
from ..console.terminal import amount
from .input_file import PlacedLine
from .kept_rows import ROWS_PER_WRITE, KeptRows
from .output import Output
from .reused_rows import ReusedRows
from .spool import Row, Spool

_MAX_HELD_BYTES = 2**20


class RowWriter(Protocol):
    """Writes rows in line order, regardless of the order in which they finish."""

    def write(self, rows: list[tuple[PlacedLine, Row]]) -> None:
        """Write rows, or store them until earlier rows are available; raises OutputLost."""

    def drain(self) -> bool:
        """Write some stored rows that are next in order; return whether there are more."""

    def flush(self) -> None:
        """Make all rows durable, so that a resume finds them."""

    def rescue(self, rows: list[tuple[PlacedLine, Row]]) -> None:
        """Spool these rows and the held ones after `write` or `drain` failed."""


class ResumableWriter(RowWriter, Protocol):
    """Writer of one run, resumed or not: `start` before the first row, `finish` after the last."""

    @property
    def num_kept(self) -> int:
        """Return the number of lines that are not run because they have a row."""

    @property
    def num_kept_ok(self) -> int:
        """Return the number of kept rows that are successful."""

    @property
    def num_reused(self) -> int:
        """Return the number of kept rows that are results of other runs."""

    @property
    def created(self) -> int | None:
        """Return the timestamp of the kept replies; None without any."""

    @property
    def num_written(self) -> int:
        """Return the number of rows in the output."""

    @property
    def num_truncated(self) -> int:
        """Return the number of rows in the output with an answer truncated at its token limit."""

    @property
    def is_resumable(self) -> bool:
        """Return whether finished rows outlive this process, in any order."""

    def has_row(self, place: int) -> bool:
        """Return whether the line at this place already has a row; called before `start`."""

    def start(self) -> None:
        """Prepare the files, which are unchanged before."""

    def finish(self) -> None:
        """Make sure that all rows have arrived; raises RunIncomplete if a line has no row."""

    def resume_hint(self) -> str:
        """Return where the rows are after a stop, and how to resume."""


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """Output files of a run: `output` for all rows, or `errors` for the failed ones."""

    output: Output
    errors: Output | None = None
    is_for_table: bool = field(default=False, kw_only=True)
    """Whether a table of results is written from the rows at the end."""

    def start(self, cuts: Sequence[int]) -> None:
        """Truncate each file to its number of bytes in `cuts`."""
        for file, cut in zip(self._all, cuts, strict=True):
            file.start(cut)

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows in input order, with failed ones to the error file, if any."""
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


class OrderedRows:
    """Puts new and finished rows into line order, after the `kept` ones; a `RowWriter`.

    New rows that wait are stored in the `spool`; `finished` rows of earlier runs may be elsewhere.
    After a method has failed, the output is no longer written, because it may contain some of
    the rows: `rescue` spools those that may be missing.
    """

    def __init__(
        self,
        files: OutputFiles,
        kept: KeptRows,
        spool: Spool,
        finished: Sequence[FinishedRows] = (),
    ) -> None:
        self._place = kept.num_rows  # of the next row to write
        self._num_truncated = kept.num_truncated
        self._files = files
        self._spool = spool
        self._finished = finished
        self._num_written = kept.num_rows
        self._held: list[tuple[PlacedLine | None, Row]] = []
        self._held_bytes = 0
        self._has_failed = False

    @property
    def num_written(self) -> int:
        """Return the number of rows in the output."""
        return self._num_written

    @property
    def num_truncated(self) -> int:
        """Return the number of rows in the output with an answer truncated at its token limit."""
        return self._num_truncated

    @property
    def is_resumable(self) -> bool:
        """Return whether finished rows outlive this process, in any order."""
        return self._spool.is_durable

    def has_row(self, place: int) -> bool:
        """Return whether the line at this place already has a row; called before `start`."""
        return place < self._place or self._rows_of(place) is not None

    def resume_hint(self) -> str:
        """Return the output's hint and the number of spooled rows; for a table, only the way."""
        if self._files.is_for_table:
            return (
                "Finished rows are saved: to run the rest and write the table, run the same "
                "command with --resume"
            )
        return self._files.output.resume_hint() + self._spool.words()

    def write(self, rows: list[tuple[PlacedLine, Row]]) -> None:
        """Write rows that are next in order, and spool the others."""
        self._begin()
        spool, has_finished = self._spool, bool(self._finished)
        for line, row in sorted(rows, key=_LINE_OF):
            if line.place == self._place:
                self._hold(line, row)
                if has_finished or spool.num_waiting:
                    self._copy(ROWS_PER_WRITE)
            else:
                spool.add(line, row)
        self._write_held()
        self._has_failed = False

    def drain(self) -> bool:
        """Write up to `ROWS_PER_WRITE` finished rows that are next in order.

        Returns whether there are more.
        """
        self._begin()
        self._copy(ROWS_PER_WRITE)
        self._write_held()
        if self._spool.num_popped:
            self._spool.reclaim()
        is_more = self._rows_of(self._place) is not None
        self._has_failed = False
        return is_more

    def flush(self) -> None:
        """Make the spooled rows durable."""
        self._spool.flush()

    def rescue(self, rows: list[tuple[PlacedLine, Row]]) -> None:
        """Spool these rows and the held ones; rows popped from the spool are still in its file."""
        for line, row in [*self._held, *rows]:
            if line is not None and line.place >= self._num_written:
                self._spool.add(line, row)
        self._spool.flush()

    def _begin(self) -> None:
        """Mark the writer as failed until the caller succeeds; raises RunIncomplete if it is."""
        if self._has_failed:
            raise RunIncomplete("the output cannot be written after an earlier failure")
        self._has_failed = True

    def _write_rest(self) -> None:
        """Write all remaining finished rows; raises RunIncomplete if a line has no row."""
        while self.drain():
            pass
        if self._num_written != self._spool.num_rows:
            raise RunIncomplete(
                f"the output has {self._num_written:,} of {amount(self._spool.num_rows, 'row')}"
            )

    def _copy(self, most: int) -> None:
        for _ in range(most):
            if (finished := self._rows_of(self._place)) is None:
                return
            self._hold(None, finished.pop(self._place))

    def _rows_of(self, place: int) -> FinishedRows | None:
        """Return the finished rows with the row of this place, if any."""
        if self._spool.num_waiting and place in self._spool:
            return self._spool
        for rows in self._finished:
            if place in rows:
                return rows
        return None

    def _hold(self, line: PlacedLine | None, row: Row) -> None:
        self._held.append((line, row))
        self._place += 1
        self._held_bytes += len(row.data)
        if len(self._held) == ROWS_PER_WRITE or self._held_bytes >= _MAX_HELD_BYTES:
            self._write_held()

    def _write_held(self) -> None:
        if self._held:
            rows = [row for _, row in self._held]
            self._files.write(rows)
            self._num_written += len(rows)
            self._held, self._held_bytes = [], 0
            self._num_truncated += count_truncated([data for data, _ in rows])


_LINE_OF: Final = itemgetter(0)  # lines are in the order of their places


class AppendWriter(OrderedRows):
    """Runs the lines after the kept rows; a `ResumableWriter`.

    `spool` contains out-of-order rows, including those of an earlier run. `stale` are files of an
    older run, which `start` removes; `reused` rows are results of other runs.
    """

    def __init__(
        self,
        files: OutputFiles,
        kept: KeptRows,
        spool: Spool,
        *,
        stale: Sequence[Path] = (),
        reused: ReusedRows | None = None,
    ) -> None:
        super().__init__(files, kept, spool, () if reused is None else (reused,))
        self._kept = kept
        self._stale = stale
        places = () if reused is None else reused.places
        self.num_reused = sum(place >= kept.num_rows and place not in spool for place in places)
        self.num_kept = kept.num_rows + spool.num_waiting + self.num_reused
        self.num_kept_ok = kept.num_ok + spool.num_ok + self.num_reused
        self.created = spool.created if kept.created is None else kept.created

    def start(self) -> None:
        """Truncate the files after the kept rows."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._files.start(self._kept.cuts)

    def finish(self) -> None:
        """Make sure that all rows have arrived; raises RunIncomplete if a line has no row."""
        self._write_rest()
        self._spool.remove()
        self._files.finish()
