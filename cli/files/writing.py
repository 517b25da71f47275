"""Which lines of an input are run, and where their rows go: behind those that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from cli.files.output import Output
from cli.files.resume import ROWS_PER_WRITE, Kept
from cli.files.spill import Spill
from engine.batchfile.lines import RawLine

_MAX_HELD_BYTES = 2**20

Row = tuple[bytes, bool]
"""A printed row, newline included, and whether it is a success."""


class RowWriter(Protocol):
    """Takes finished rows in the order of their lines."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, at most `ROWS_PER_WRITE` at once; raises OutputLost."""


class Writing(RowWriter, Protocol):
    """One run's way of writing: `begin` before the first row, `finish` after the last."""

    @property
    def num_kept(self) -> int:
        """Lines that are not run because they have their row."""

    @property
    def num_kept_ok(self) -> int:
        """Those of `num_kept` whose row is a success."""

    @property
    def created(self) -> int | None:
        """What the kept replies say of when they were made."""

    @property
    def spill(self) -> Spill | None:
        """What keeps finished rows that wait for their order; None where nothing can."""

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return those of the input's lines that are to be run."""

    def begin(self) -> None:
        """Make the files ready; until then all of them are as they were."""

    def finish(self) -> None:
        """Make sure that all rows have arrived where they were to go."""

    def how_to_go_on(self) -> str:
        """Say where the rows are after a stop, and how to run the rest."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a run: all rows go to `output`, or errors into their own when there is one."""

    output: Output
    errors: Output | None = None

    def begin(self, cuts: Sequence[int]) -> None:
        """Drop what was there but the first bytes of each; `cuts` says how many."""
        for file, cut in zip(self._all, cuts, strict=True):
            file.begin(cut)

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
    """Rows of lines that are not run again, by the places of these lines."""

    def __contains__(self, place: object) -> bool: ...

    def take(self, place: int) -> Row:
        """Return the row of a line; they are taken in the order of lines, each once."""


class Merging:
    """Rows of lines that are run, each behind the finished rows of the lines before it.

    The next row to be written is that of the line at `place`.
    """

    def __init__(self, files: Files, place: int, finished: Sequence[FinishedRows]) -> None:
        self._files = files
        self._place = place
        self._finished = finished
        self._held: list[Row] = []
        self._held_bytes = 0

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows of lines that were run, and the finished ones before and behind them."""
        for row in rows:
            self._copy()
            self._hold(row)
        self.copy()

    def copy(self) -> None:
        """Write the finished rows whose turn has come."""
        self._copy()
        self._flush()

    def _copy(self) -> None:
        while there := next((rows for rows in self._finished if self._place in rows), None):
            self._hold(there.take(self._place))

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
    """What a spill file holds of an earlier run, as `FinishedRows`."""

    def __init__(self, spill: Spill) -> None:
        self._rows = spill.spilled

    def __contains__(self, place: object) -> bool:
        return place in self._rows

    def take(self, place: int) -> Row:
        """Return the row of a line, which is no longer spilled then."""
        spilled = self._rows.pop(place)
        return spilled.row, spilled.is_success


class Appending:
    """Runs the lines behind those whose rows are kept; a `Writing`.

    `spill` keeps rows that wait for their order, with those of an earlier run that it has loaded.
    `stale` are files of an older run, which go when this one begins.
    """

    def __init__(
        self, files: Files, kept: Kept, spill: Spill | None = None, *, stale: Sequence[Path] = ()
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
        self._merging = Merging(files, kept.num_rows, finished)

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return the lines without a row."""
        behind = islice(lines, self._kept.num_rows, None)
        if not self._places:
            return behind
        numbered = enumerate(behind, start=self._kept.num_rows)
        return (raw for place, raw in numbered if place not in self._places)

    def begin(self) -> None:
        """Cut the files behind what is kept."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._files.begin(self._kept.cuts)
        self._merging.copy()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows through."""
        if self._places:
            self._merging.write(rows)
        else:
            self._files.write(rows)

    def finish(self) -> None:
        """Make sure that all rows have arrived."""
        self._merging.copy()
        if self.spill is not None:
            self.spill.remove()
        self._files.finish()

    def how_to_go_on(self) -> str:
        """Say what the output says, and how many rows wait beside it."""
        words = self._files.output.how_to_go_on()
        return words if self.spill is None else words + self.spill.words()
