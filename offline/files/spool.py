"""Spool: finished rows that wait for the rows of earlier lines, on disk with an index in memory.

Lines run in any order, but the output is in input order, so a row may have to wait for many others.
The spool next to the output limits the memory for this to 12 bytes per line and makes such rows
durable: each record is the number of an input line, a tab and its row. A resume reads the spool,
and a completed run removes it.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final, NamedTuple

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import RowError, RowHead, parse_row_head, row_id_of

from ..console.errors import BadInput, OutputLost
from ..console.terminal import amount, log
from .input_file import PlacedLine
from .kept_rows import is_success

_NEW: Final = ".new"
_BUFFER_BYTES: Final = 2**20
# Beyond this size, the file is compacted: records of rows already in the output are removed.
_MAX_STALE_BYTES: Final = 2**26
_MAX_DIGITS: Final = 19


class Row(NamedTuple):
    """A printed row, including its newline, and whether it is a success."""

    data: bytes
    is_success: bool


class Spool:
    """Spool of one output of `num_rows` rows.

    Without a `path`, or if no file can be created there, it is an unnamed temporary file that
    does not outlive the process.
    """

    def __init__(self, path: Path | None, num_rows: int, *, tmp_dir: Path | None = None) -> None:
        self.num_rows = num_rows
        self._path = path
        self._tmp_dir = tmp_dir
        self._file: IO[bytes] | None = None
        self._offsets = array("q", [-1]) * num_rows  # by place; -1 if no row waits
        self._lengths = array("i", [0]) * num_rows  # negative for an error row
        self._unflushed: dict[int, bytes] = {}  # by place
        self._buffer: list[bytes] = []
        self._num_flushed = 0  # bytes of the file
        self._end = 0  # of the file once the buffer is flushed
        self._live_bytes = 0
        self.num_waiting = 0
        self.num_popped = 0  # since `reclaim`
        self.num_ok = 0
        self.created: int | None = None

    def load(
        self,
        lines: Iterable[RawLine],
        num_done: int,
        *,
        only_successes: bool = False,
        is_ok: Callable[[RowHead], bool] = is_success,
    ) -> None:
        """Index the rows of an earlier run that belong to lines after the first `num_done`.

        Rows of other or changed lines are skipped, as is an incomplete last row. Raises BadInput
        for an unreadable file.
        """
        if self._path is None or not self._path.exists():
            return
        try:
            self._file = self._path.open("r+b", buffering=0)
            records = _Records(self._path, is_ok)
        except OSError as exc:
            raise BadInput(
                f"{self._path} contains finished rows, but cannot be read ({exc.strerror}): make "
                "it readable, or remove it to run its lines again"
            ) from exc
        self._end = self._num_flushed = records.num_bytes
        for place, raw in enumerate(lines):
            for record in records.of(raw):
                if place >= num_done and (record.is_success or not only_successes):
                    self._index(place, record.offset, record.length, is_success=record.is_success)
                    self.created = record.created if self.created is None else self.created

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and place < self.num_rows and self._offsets[place] >= 0

    @property
    def is_durable(self) -> bool:
        """Return whether its rows outlive the process."""
        return self._path is not None

    @property
    def places(self) -> list[int]:
        """Return the places of the waiting rows, in order."""
        return [place for place, offset in enumerate(self._offsets) if offset >= 0]

    def add(self, line: PlacedLine, row: Row) -> None:
        """Add the row of a line; raises OutputLost if the disk is full."""
        head = b"%d\t" % line.raw.number
        offset = self._end + len(head)
        # The record comes first: even if a later step fails, `flush` makes the row durable.
        self._buffer += (head, row.data)
        self._end = offset + len(row.data)
        self._unflushed[line.place] = row.data
        self._index(line.place, offset, len(row.data), is_success=row.is_success)
        if self._end - self._num_flushed >= _BUFFER_BYTES:
            self.flush()

    def pop(self, place: int) -> Row:
        """Remove a row from the index and return it."""
        offset, length = self._offsets[place], self._lengths[place]
        data = self._unflushed.pop(place, None) or self._read(offset, abs(length))
        self._forget(place)
        self.num_popped += 1
        return Row(data, length > 0)

    def flush(self) -> None:
        """Write buffered rows to the file; raises OutputLost if the disk is full."""
        if not self._buffer:
            return
        joined, file = b"".join(self._buffer), self._opened()
        try:
            file.seek(self._num_flushed)
            _write_all(file, joined)
        except OSError as exc:
            raise OutputLost(self._failure(exc)) from exc
        self._num_flushed += len(joined)
        self._buffer, self._unflushed = [], {}

    def reclaim(self) -> None:
        """Free the space of popped rows; called once they are in the output."""
        self.num_popped = 0
        if not self.num_waiting and self._end:
            if self._file is not None:
                self._file.truncate(0)
            self._buffer, self._num_flushed, self._end = [], 0, 0
        num_stale = self._end - self._live_bytes
        if self._live_bytes < _MAX_STALE_BYTES < num_stale - self._live_bytes:
            self._compact()

    def remove(self) -> None:
        """Remove the file, whose rows are in the output or not needed."""
        self.close()
        if self._path is not None:
            for path in (self._path, self._path.with_name(self._path.name + _NEW)):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; its rows stay for a resume."""
        if self._file is not None:
            self._file.close()

    def words(self) -> str:
        """Return a sentence with the number of rows stored for a resume; empty without any."""
        if not self.num_waiting or self._path is None:
            return ""
        waiting = amount(self.num_waiting, "finished row")
        return f". {waiting} waiting for earlier rows are in {self._path}"

    def _index(self, place: int, offset: int, length: int, *, is_success: bool) -> None:
        if place in self:
            self._forget(place)
        self._offsets[place] = offset
        self._lengths[place] = length if is_success else -length
        self._live_bytes += length
        self.num_waiting += 1
        self.num_ok += is_success

    def _forget(self, place: int) -> None:
        length = self._lengths[place]
        self._offsets[place] = -1
        self._live_bytes -= abs(length)
        self.num_waiting -= 1
        self.num_ok -= length > 0

    def _read(self, offset: int, length: int) -> bytes:
        assert self._file is not None
        try:
            data = os.pread(self._file.fileno(), length, offset)
        except OSError as exc:
            raise OutputLost(f"{self._path or 'the spool'} cannot be read ({exc})") from exc
        if len(data) < length or not data.endswith(b"\n"):
            raise OutputLost(f"{self._path or 'the spool'} changed during the run")
        return data

    def _opened(self) -> IO[bytes]:
        if self._file is None and self._path is not None:
            try:
                self._file = self._path.open("w+b", buffering=0)
            except OSError as exc:
                log(
                    f"note: {self._path} cannot be created ({exc.strerror}): finished rows that "
                    "wait for earlier rows are lost if this run is stopped"
                )
                self._path = None
        if self._file is None:
            try:
                self._file = self._temporary()
            except OSError as exc:
                raise OutputLost(self._failure(exc)) from exc
        return self._file

    def _temporary(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._tmp_dir, buffering=0)

    def _failure(self, exc: OSError) -> str:
        name = self._path or f"a temporary file in {self._tmp_dir or tempfile.gettempdir()}"
        return f"{name}, which stores waiting rows, cannot be written ({exc.strerror})"

    def _compact(self) -> None:
        """Copy the waiting rows to a new file; the old one stays if the disk is full."""
        self.flush()
        old = self._opened()
        with suppress(OSError), ExitStack() as stack:
            if self._path is None:
                new = self._temporary()
            else:
                growing = self._path.with_name(self._path.name + _NEW)
                stack.callback(growing.unlink, missing_ok=True)
                new = growing.open("w+b", buffering=0)
            stack.callback(new.close)
            offsets, end = self._copy_waiting(new)
            if self._path is not None:
                growing.replace(self._path)
            stack.pop_all()
            self._file, self._offsets = new, offsets
            self._end = self._num_flushed = end
            old.close()

    def _copy_waiting(self, new: IO[bytes]) -> tuple[array[int], int]:
        """Copy the waiting rows; return their offsets in the new file, and its size."""
        offsets, end = self._offsets[:], 0
        for place in self.places:
            offset, length = offsets[place], abs(self._lengths[place])
            # The number of the line precedes its row.
            start = max(0, offset - _MAX_DIGITS - 1)
            data = self._read(start, offset - start + length)
            head = data[: offset - start].rpartition(b"\n")[2]
            offsets[place] = end + len(head)
            record = head + data[offset - start :]
            _write_all(new, record)
            end += len(record)
        return offsets, end


def _write_all(file: IO[bytes], data: bytes) -> None:
    """Write all bytes to an unbuffered file; a disk that is almost full takes some of them."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


class _Record(NamedTuple):
    """A row in the file: its position, and facts from its head."""

    offset: int
    length: int
    is_success: bool
    created: int | None


class _Records:
    """Index of the complete records of a file, looked up by its lines in order."""

    def __init__(self, path: Path, is_ok: Callable[[RowHead], bool]) -> None:
        self._is_ok = is_ok
        self.num_bytes = 0
        self._numbers, self._offsets, self._lengths = array("q"), array("q"), array("q")
        self._ids, self._created = bytearray(), array("q")
        with path.open("rb") as file:
            for data in file:
                if data.endswith(b"\n"):
                    self._add(data)
                    self.num_bytes += len(data)
        in_order = sorted(range(len(self._numbers)), key=self._numbers.__getitem__)
        self._order = array("q", in_order)
        self._next = 0

    def of(self, raw: RawLine) -> Iterator[_Record]:
        """Yield the records that match a line's current content, oldest first."""
        while self._next < len(self._order):
            index = self._order[self._next]
            if self._numbers[index] > raw.number:
                return
            self._next += 1
            row_id = row_id_of(raw.digest).encode()
            if self._numbers[index] == raw.number and self._id(index, len(row_id)) == row_id:
                length, created = self._lengths[index], self._created[index]
                yield _Record(
                    self._offsets[index], abs(length), length > 0, created if created >= 0 else None
                )

    def _id(self, index: int, size: int) -> bytes:
        return bytes(self._ids[index * size : (index + 1) * size])

    def _add(self, data: bytes) -> None:
        number, _, row = data.partition(b"\t")
        if not (len(number) < _MAX_DIGITS and number.isdigit()):
            return
        try:
            head = parse_row_head(row)
        except RowError:
            return
        if len(head.row_id) != _ID_CHARS or not head.row_id.isascii():
            return
        self._numbers.append(int(number))
        self._offsets.append(self.num_bytes + len(number) + 1)
        self._lengths.append(len(row) if self._is_ok(head) else -len(row))
        self._ids += head.row_id.encode()
        self._created.append(_created_of(head))


def _created_of(head: RowHead) -> int:
    return head.created if isinstance(head.created, int) and head.created >= 0 else -1


_ID_CHARS: Final = len(row_id_of(RawLine(1, b"").digest))
