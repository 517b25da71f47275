"""Spill file: keeps finished rows that wait for the rows of earlier lines.

The output is in input order, so a row after a slow line is only in memory until that line is
finished. The spill file beside the output makes it survive the process: each line is the number of
an input line, a tab and the row. A resume reads it, and a completed run removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import RowError, RowHead, parse_row_head, row_id_of

from ..console.errors import BadInput
from ..console.terminal import amount, log

SUFFIX: Final = ".spill"
_NEW: Final = ".new"
# Stale rows that the file may hold beyond the size of the waiting ones.
_SLACK_BYTES: Final = 2**20
_MAX_DIGITS: Final = 19

Waiting = tuple[int, bytes]
"""The number of a line and its row, newline included."""


class Spilled(NamedTuple):
    """A row that an earlier run has spilled."""

    number: int
    row: bytes
    is_success: bool


class Spill:
    """The spill file of one output. `save` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._spilled: dict[int, Spilled] = {}  # by the place of the line among all
        self._saved: set[int] = set()
        self._num_bytes = 0
        self._is_stale = False
        self._is_off = False
        self._num_waiting = 0
        self.created: int | None = None

    def load(
        self, lines: Iterable[RawLine], num_done: int, *, only_successes: bool = False
    ) -> None:
        """Load the rows that an earlier run spilled for lines after the first `num_done`.

        Rows of other or changed lines are skipped, as is a torn end. Raises BadInput for an
        unreadable file.
        """
        try:
            found = dict(_rows_in(self._path))
        except OSError as exc:
            raise BadInput(
                f"{self._path} holds finished rows and cannot be read ({exc.strerror}): mend that, "
                "or remove it and its lines run again"
            ) from exc
        self._is_stale = self._path.exists()
        last = max(found, default=0)
        for place, raw in enumerate(lines):
            if raw.number > last:
                break
            if place < num_done or raw.number not in found:
                continue
            row, head = found[raw.number]
            is_success = head.status_code == 200
            if head.row_id == row_id_of(raw.digest) and (is_success or not only_successes):
                self._spilled[place] = Spilled(raw.number, row, is_success)
                self.created = head.created if self.created is None else self.created

    @property
    def spilled(self) -> dict[int, Spilled]:
        """Rows of an earlier run that are not in the output yet, by the place of their lines."""
        return self._spilled

    def save(self, waiting: Sequence[Waiting]) -> None:
        """Save the waiting rows to the file; a write error is logged once and ends spilling."""
        with self._lock:
            earlier = [(spilled.number, spilled.row) for spilled in [*self._spilled.values()]]
            live = [*earlier, *waiting]
            try:
                self._save(live)
            except OSError as exc:
                self._give_up(exc)
            self._num_waiting = 0 if self._is_off else len(live)

    def remove(self) -> None:
        """Remove the file: its rows are in the output, or nobody wants them."""
        with self._lock:
            self._remove()

    def words(self) -> str:
        """Say how many finished rows it keeps; nothing where it keeps none."""
        if not self._num_waiting:
            return ""
        waiting = amount(self._num_waiting, "finished row")
        return f". {waiting} that wait for rows before them are kept in {self._path}"

    def _save(self, live: Sequence[Waiting]) -> None:
        if self._is_off:
            return
        if not live:
            self._remove()
            return
        new = [(number, row) for number, row in live if number not in self._saved]
        num_new = sum(len(row) for _, row in new)
        num_live = sum(len(row) for _, row in live)
        if self._is_stale or self._num_bytes + num_new > 2 * num_live + _SLACK_BYTES:
            new_path = self._path.with_name(self._path.name + _NEW)
            with new_path.open("wb") as file:
                file.writelines(_printed(live))
            new_path.replace(self._path)
            self._num_bytes, self._saved, self._is_stale = num_live, {n for n, _ in live}, False
        elif new:
            with self._path.open("ab") as file:
                file.writelines(_printed(new))
            self._num_bytes += num_new
            self._saved.update(number for number, _ in new)

    def _give_up(self, exc: OSError) -> None:
        self._is_off = True
        log(
            f"note: {self._path} cannot be written ({exc.strerror}): finished rows that wait for "
            "rows before them are lost if this run is stopped"
        )

    def _remove(self) -> None:
        if self._num_bytes or self._is_stale:
            for path in (self._path, self._path.with_name(self._path.name + _NEW)):
                path.unlink(missing_ok=True)
        self._num_bytes, self._saved, self._is_stale = 0, set(), False


def spill_path(output: Path) -> Path:
    """Return the path of an output's spill file."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + SUFFIX)


def _printed(rows: Iterable[Waiting]) -> Iterator[bytes]:
    for number, row in rows:
        yield b"%d\t%b" % (number, row)


def _rows_in(path: Path) -> Iterator[tuple[int, tuple[bytes, RowHead]]]:
    """Yield the complete rows of a spill file with their line numbers."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for data in file:
            number, _, row = data.partition(b"\t")
            if not (len(number) < _MAX_DIGITS and number.isdigit() and row.endswith(b"\n")):
                continue
            try:
                yield int(number), (row, parse_row_head(row))
            except RowError:
                continue
