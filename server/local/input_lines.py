"""Lines of the input files of batches by number, with a stored index of each plain file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from tidemill.batch.file.formats import detect_file, open_lines
from tidemill.batch.file.line_blocks import LineBlocks
from tidemill.batch.file.lines import RawLine, read_lines

from .batches import StoredBatch
from .database import Database
from .folder import Folder

SCHEMA = """
CREATE TABLE IF NOT EXISTS line_blocks (
    batch INTEGER PRIMARY KEY,
    newlines BLOB NOT NULL
)
"""
READ_BYTES: Final = 2**25
"""Bytes of requests that one call reads at most; a compressed file is read from its start."""

_MAX_GAP: Final = 64


class InputLines:
    """Lines of the inputs of all batches."""

    def __init__(self, database: Database, folder: Folder) -> None:
        self._database = database
        self._folder = folder

    def put(self, batch_id: str, blocks: LineBlocks) -> None:
        """Store the index of a batch's input."""
        query = "INSERT OR REPLACE INTO line_blocks SELECT place, ? FROM batches WHERE id = ?"
        with self._database.writing() as connection:
            connection.execute(query, (blocks.to_bytes(), batch_id))

    def read(self, stored: StoredBatch, lines: Sequence[int]) -> dict[int, bytes]:
        """Return lines as far as they are within the limit; raises FileNotFoundError."""
        found: dict[int, bytes] = {}
        wanted = sorted(lines)
        if not wanted:
            return found
        room = READ_BYTES
        with self._path_of(stored).open("rb") as file:
            for raw in self._lines(stored, file, wanted):
                room -= len(raw.data)
                if room < 0:
                    break
                if raw.number in lines and raw.overlong is None:
                    found[raw.number] = raw.data
        return found

    def _lines(
        self, stored: StoredBatch, file: BinaryIO, wanted: Sequence[int]
    ) -> Iterator[RawLine]:
        """Yield the lines of a file that are wanted, and perhaps some between them."""
        form = detect_file(file, stored.batch.endpoint)
        if not form.is_plain:
            yield from _until(read_lines(open_lines(form, file)), wanted[-1])
            return
        blocks, first = self._blocks_of(stored, file), 0
        for place, number in enumerate(wanted):
            following = wanted[place + 1 : place + 2]
            if following and following[0] - number <= _MAX_GAP:
                continue
            yield from _until(blocks.lines(file.fileno(), wanted[first]), number)
            first = place + 1

    def _blocks_of(self, stored: StoredBatch, file: BinaryIO) -> LineBlocks:
        """Return the index of a file; for a batch of an earlier version it is made here."""
        query = "SELECT newlines FROM line_blocks WHERE batch = ?"
        for (data,) in self._database.read(query, stored.place):
            return LineBlocks(data)
        blocks = LineBlocks()
        blocks.count_all(file.fileno())
        self.put(stored.batch.id, blocks)
        return blocks

    def _path_of(self, stored: StoredBatch) -> Path:
        if stored.batch.is_terminal:
            return self._folder.file(stored.batch.input_file_id)
        return self._folder.work_path(stored.batch.id) / "input"


def _until(lines: Iterator[RawLine], last: int) -> Iterator[RawLine]:
    for raw in lines:
        if raw.number > last:
            return
        yield raw
        if raw.number == last:
            return
