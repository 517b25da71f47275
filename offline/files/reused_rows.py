"""Reused rows: results of other runs by place of the line, until they are in the output."""

from __future__ import annotations

import tempfile
from array import array
from pathlib import Path
from typing import IO, Final

from .spool import Row

_BUFFER_BYTES: Final = 2**20


class ReusedRows:
    """Rows of lines that are not run, as `FinishedRows`: a temporary file and 8 bytes per line."""

    def __init__(self, tmp_dir: Path | None) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 - until `close`
            dir=tmp_dir, buffering=_BUFFER_BYTES
        )
        self._ends = array("q", [0])
        self._num_taken = 0

    def add(self, row: bytes | None) -> None:
        """Add the row of the next line; None means that it has no row."""
        if row is not None:
            self._file.write(row)
        self._ends.append(self._ends[-1] + len(row or b""))

    def drop(self) -> None:
        """Forget all rows, so that their lines are run."""
        self._ends = array("q", bytes(len(self._ends) * self._ends.itemsize))

    def __contains__(self, place: object) -> bool:
        """Return whether the line at a place has a row that was not yet popped."""
        if not isinstance(place, int) or not self._num_taken <= place < len(self._ends) - 1:
            return False
        return self._ends[place + 1] > self._ends[place]

    def pop(self, place: int) -> Row:
        """Return the row of a line, and drop the rows before it."""
        self._num_taken = place + 1
        self._file.seek(self._ends[place])
        return Row(self._file.read(self._ends[place + 1] - self._ends[place]), is_success=True)

    @property
    def places(self) -> list[int]:
        """Return the places of the lines that have a row."""
        return [place for place in range(len(self._ends) - 1) if place in self]

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
