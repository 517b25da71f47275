"""Rows of a file's lines, found in files of rows that are in line order: one pass, flat memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from pydantic_core import from_json

from .lines import FormatError, LineError, RawLine, parse_line
from .rows import is_success

_ID_AT_START: Final = re.compile(rb'\{(?:"id":"[^"\\]*",)?"custom_id":"([^"\\]+)",')


def rows_of_lines(
    lines: Iterable[RawLine],
    runs: Sequence[Iterable[Iterable[bytes]]],
    *,
    are_requests: bool = False,
) -> Iterator[tuple[RawLine, bytes | None]]:
    """Yield each line with its row in the first run that has one; None without a row.

    A failed row never replaces the successful one of a later run. A run is the output and the
    errors of one batch, each in line order. If all lines `are_requests`, only those whose custom ID
    is not in its usual place are parsed. Raises FormatError at the end if rows are left, which
    belong to other lines.
    """
    readers = [[_RowReader(file) for file in files] for files in runs]
    for raw in lines:
        custom_id = (_id_at_start(raw.data) if are_requests else None) or _id_of_line(raw)
        found = [
            reader.pop()
            for files in readers
            if (reader := next((one for one in files if one.is_of(custom_id)), None)) is not None
        ]
        yield raw, next(filter(is_success, found), found[0] if found else None)
    if any(reader.has_more for files in readers for reader in files):
        raise FormatError("The rows do not belong to the lines of this input.")


def _id_at_start(data: bytes) -> str | None:
    """Return the custom ID from its usual position in lines and rows; None if it is elsewhere."""
    match = _ID_AT_START.match(data)
    return match[1].decode() if match else None


def _id_of_line(raw: RawLine) -> str | None:
    try:
        return parse_line(raw).custom_id
    except LineError as exc:
        return exc.custom_id


class _RowReader:
    """Reads rows with a look-ahead of one row."""

    def __init__(self, file: Iterable[bytes]) -> None:
        self._file = iter(file)
        self._data = b""
        self._custom_id: Any = None
        self.pop()

    @property
    def has_more(self) -> bool:
        """Say whether there is a next row."""
        return bool(self._data)

    def is_of(self, custom_id: str | None) -> bool:
        """Say whether the next row belongs to a line."""
        return bool(self._data) and self._custom_id == custom_id

    def pop(self) -> bytes:
        """Return the next row and advance."""
        data, self._data = self._data, next(self._file, b"")
        # Another server's rows may begin differently.
        if self._data:
            self._custom_id = _id_at_start(self._data) or from_json(self._data).get("custom_id")
        return data
