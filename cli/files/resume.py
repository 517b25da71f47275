"""Which rows of an interrupted run stand, and where its files are to be cut."""

from __future__ import annotations

import io
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cli.errors import BadInput
from engine.batchfile.lines import RawLine
from engine.batchfile.rows import RowError, RowHead, parse_row_head, row_id_of

ROWS_PER_WRITE = 1_000
"""The most rows written between the two files, so the most that one may be ahead of the other."""

_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Kept:
    """The first `len(ok)` lines have their rows, which end at `cuts[i]` bytes in file i.

    `ok` has a 1 for each of them whose row is a success, else a 0. `created` is what the kept
    replies carry, so that those to come carry the same.
    """

    ok: bytes
    cuts: tuple[int, ...]
    created: int | None = None

    @property
    def num_rows(self) -> int:
        """Lines that have their row."""
        return len(self.ok)

    @property
    def num_ok(self) -> int:
        """Those whose row is a success."""
        return self.ok.count(1)


def find_kept(lines: Iterable[RawLine], paths: list[Path]) -> Kept:
    """Compare the rows in the files with the lines that they must be of.

    Together the files must hold the rows of the first lines, each file in their order; a torn last
    row does not count. One of two files may be ahead of the other by what one write holds, and is
    cut back. Raises BadInput for rows that are not of these lines.
    """
    with ExitStack() as stack:
        readers = []
        for path in paths:
            file = path.open("rb", buffering=_BUFFER_BYTES) if path.exists() else io.BytesIO()
            readers.append(_RowReader(path, stack.enter_context(file)))
        return _compare(lines, readers)


def _compare(lines: Iterable[RawLine], readers: list[_RowReader]) -> Kept:
    ok = bytearray()
    num_ahead = 0
    cuts = [0] * len(readers)
    created: int | None = None
    missing: RawLine | None = None
    for raw in lines:
        if all(reader.head is None for reader in readers):
            break
        row_id = row_id_of(raw.digest)
        index = _index_of(row_id, readers)
        if index is None:
            missing = missing or raw
            if len(readers) == 1:
                break
            continue
        head = readers[index].take()
        if missing is not None:
            num_ahead += 1
            continue
        cuts[index] = readers[index].num_bytes
        ok.append(head.status_code == 200)
        created = head.created if created is None else created
    _refuse_strangers(readers, missing, num_ahead)
    return Kept(bytes(ok), tuple(cuts), created)


def _index_of(row_id: str, readers: list[_RowReader]) -> int | None:
    for index, reader in enumerate(readers):
        if reader.head is not None and reader.head.row_id == row_id:
            return index
    return None


def _refuse_strangers(readers: list[_RowReader], missing: RawLine | None, num_ahead: int) -> None:
    for reader in readers:
        if reader.head is None:
            continue
        line = f"line {missing.number} of the input" if missing else "any line of the input"
        raise BadInput(
            f"row {reader.num_rows + 1} of {reader.path} (custom_id {reader.head.custom_id!r}) is "
            f"not of {line}: this output was made from another input or with other files. Give "
            "what it was made with, or write it anew: --force without --resume"
        )
    if missing is not None and num_ahead > ROWS_PER_WRITE:
        names = " and ".join(str(reader.path) for reader in readers)
        raise BadInput(
            f"the row of line {missing.number} of the input is missing from {names}, which go on "
            f"for {num_ahead:,} rows: give the files of the run that is to be resumed"
        )


class _RowReader:
    """The complete rows of one file, one ahead: `head` is the next, None at the end."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.num_rows = 0
        self.num_bytes = 0
        self.head: RowHead | None = None
        self._rows = (data for data in file if data.endswith(b"\n"))
        self._num_bytes_of_next = 0
        self._advance()

    def take(self) -> RowHead:
        """Return the next row and go on to the one after; `num_bytes` is then where it ends."""
        taken = self.head
        assert taken is not None
        self.num_rows += 1
        self.num_bytes += self._num_bytes_of_next
        self._advance()
        return taken

    def _advance(self) -> None:
        data = next(self._rows, None)
        if data is None:
            self.head = None
            return
        self._num_bytes_of_next = len(data)
        try:
            self.head = parse_row_head(data)
        except RowError as exc:
            raise BadInput(
                f"row {self.num_rows + 1} of {self.path} is damaged ({exc}): --force without "
                "--resume writes it anew"
            ) from exc
