"""Kept rows: finds the rows written by an interrupted run, and where to truncate its files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import RowError, RowHead, parse_row_head, row_id_of

from ..console.errors import BadInput

ROWS_PER_WRITE = 1_000
"""Most rows per write, and so the most that one file may be ahead of the other."""

_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of the first `len(ok)` lines; in file i they end at byte `cuts[i]`.

    `ok` has a 1 for each successful row, otherwise a 0. `created` is the timestamp of the kept
    replies, which new ones also get. `num_truncated` rows have answers that reached their token
    limit.
    """

    ok: bytes
    cuts: tuple[int, ...]
    created: int | None = None
    num_truncated: int = 0

    @property
    def num_rows(self) -> int:
        """Return the number of kept rows."""
        return len(self.ok)

    @property
    def num_ok(self) -> int:
        """Return the number of successful kept rows."""
        return self.ok.count(1)


def is_success(head: RowHead) -> bool:
    """Return whether a row is successful."""
    return head.status_code == 200


def is_whole_success(head: RowHead) -> bool:
    """Return whether a row is successful and none of its answers is truncated."""
    return is_success(head) and not head.is_truncated


def find_kept_rows(
    lines: Iterable[RawLine],
    paths: list[Path],
    *,
    is_ok: Callable[[RowHead], bool] = is_success,
    replaces_others: bool = False,
) -> KeptRows:
    """Match the rows in the files with the input lines.

    Together the files must contain the rows of the first lines, each file in order; an incomplete
    last row is ignored. One of two files may be ahead by one write, and is truncated. Raises
    BadInput for rows that do not match these lines. A retry, which `replaces_others`, matches a
    row that is not ok with the line in its place, which may have been corrected since.
    """
    with ExitStack() as stack:
        readers = []
        for path in paths:
            file = path.open("rb", buffering=_BUFFER_BYTES) if path.exists() else io.BytesIO()
            readers.append(RowReader(path, stack.enter_context(file)))
        return _compare(lines, readers, is_ok, replaces_others=replaces_others)


def _compare(
    lines: Iterable[RawLine],
    readers: list[RowReader],
    is_ok: Callable[[RowHead], bool],
    *,
    replaces_others: bool,
) -> KeptRows:
    ok = bytearray()
    num_ahead = num_truncated = 0
    cuts = [0] * len(readers)
    created: int | None = None
    missing: RawLine | None = None
    for raw in lines:
        if all(reader.head is None for reader in readers):
            break
        row_id = row_id_of(raw.digest)
        index = index_of(row_id, readers)
        if index is None and replaces_others and missing is None:
            index = _index_of_other(readers, is_ok)
        if index is None:
            missing = missing or raw
            if len(readers) == 1:
                break
            continue
        head = readers[index].pop()
        if missing is not None:
            num_ahead += 1
            continue
        cuts[index] = readers[index].num_bytes
        ok.append(is_ok(head))
        num_truncated += head.is_truncated
        created = head.created if created is None else created
    _refuse_strangers(readers, missing, num_ahead)
    return KeptRows(bytes(ok), tuple(cuts), created, num_truncated)


def index_of(row_id: str, readers: list[RowReader]) -> int | None:
    """Return the index of the reader whose next row this is, or None."""
    for index, reader in enumerate(readers):
        if reader.head is not None and reader.head.row_id == row_id:
            return index
    return None


def _index_of_other(readers: list[RowReader], is_ok: Callable[[RowHead], bool]) -> int | None:
    """Return the index of a reader whose next row is not ok, or None."""
    for index, reader in enumerate(readers):
        if reader.head is not None and not is_ok(reader.head):
            return index
    return None


def _refuse_strangers(readers: list[RowReader], missing: RawLine | None, num_ahead: int) -> None:
    for reader in readers:
        if reader.head is None:
            continue
        line = f"line {missing.number} of the input" if missing else "any line of the input"
        raise BadInput(
            f"row {reader.num_rows + 1} of {reader.path} (custom_id {reader.head.custom_id!r}) "
            f"does not match {line}: the output has another input, recipe or files. Pass the "
            "same ones, or overwrite the output: --force without --resume"
        )
    if missing is not None and num_ahead > ROWS_PER_WRITE:
        names = " and ".join(str(reader.path) for reader in readers)
        raise BadInput(
            f"the row of line {missing.number} of the input is missing from {names}, which "
            f"continue for {num_ahead:,} rows: pass the files of the run to resume"
        )


class RowReader:
    """Reads the complete rows of a file with one row of look-ahead; `head` is None at the end."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.num_rows = 0
        self.num_bytes = 0
        self.head: RowHead | None = None
        self._rows = (data for data in file if data.endswith(b"\n"))
        self._num_bytes_of_next = 0
        self._advance()

    def pop(self) -> RowHead:
        """Return the next row and advance `num_bytes` to its end."""
        head = self.head
        assert head is not None
        self.num_rows += 1
        self.num_bytes += self._num_bytes_of_next
        self._advance()
        return head

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
                f"row {self.num_rows + 1} of {self.path} is damaged ({exc}): overwrite the output "
                "with --force, without --resume"
            ) from exc
