"""Which lines of an input are run, and where their rows go: behind those that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from cli.files.output import Output
from cli.files.resume import Kept
from engine.batchfile.lines import RawLine

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


class Appending:
    """Runs the lines behind those whose rows are kept; a `Writing`.

    `stale` are files of an older run, which go when this one begins.
    """

    def __init__(self, files: Files, kept: Kept, *, stale: Sequence[Path] = ()) -> None:
        self._files = files
        self._kept = kept
        self._stale = stale
        self.num_kept = kept.num_rows
        self.num_kept_ok = kept.num_ok
        self.created = kept.created

    def lines(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        """Return the lines without a row."""
        return islice(lines, self._kept.num_rows, None)

    def begin(self) -> None:
        """Cut the files behind what is kept."""
        for path in self._stale:
            path.unlink(missing_ok=True)
        self._files.begin(self._kept.cuts)

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows through."""
        self._files.write(rows)

    def finish(self) -> None:
        """Make sure that all rows have arrived."""
        self._files.finish()

    def how_to_go_on(self) -> str:
        """Say what the output says."""
        return self._files.output.how_to_go_on()
