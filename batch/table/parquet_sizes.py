"""Decompressed sizes in a Parquet file, from its footer and the headers of its pages.

A page of some kilobytes may decompress to gigabytes, and a list in one row may have any number
of values. Both are checked here before Arrow reads them: Arrow has no limits, and ends the
process when it reads the metadata of an encrypted column.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ..file.formats import BinaryFile
from .errors import TableError

_TRUE, _FALSE, _BYTE, _INTS, _DOUBLE, _BINARY = 1, 2, 3, (4, 5, 6), 7, 8
_LISTS, _STRUCT = (9, 10), 12
_DOUBLE_BYTES = 8
_LONG_LIST = 15
_MAX_DEPTH = 32
_MAX_SHIFT = 63


class ThriftReader:
    """Reads values from bytes; raises IndexError at their end, ValueError for other data.

    `place` is the first unread byte; `is_complete` says whether a struct has ended.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0
        self.is_complete = False

    def struct(self, depth: int = 0, into: dict[int, Any] | None = None) -> dict[int, Any]:
        """Return the fields of a struct by number, added to `into` as they are read."""
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        fields: dict[int, Any] = {} if into is None else into
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        self.is_complete = depth == 0
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTS:
            return self._signed()
        if kind in {_TRUE, _FALSE}:
            return kind == _TRUE
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind in _LISTS:
            head = self._byte()
            size = head >> 4 if head >> 4 < _LONG_LIST else self._unsigned()
            inner = _BYTE if head & 15 in {_TRUE, _FALSE} else head & 15
            return [self._value(inner, depth + 1) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _BYTE:
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(_DOUBLE_BYTES)
        raise ValueError(f"kind {kind}")

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self.place:
            raise IndexError(size)
        self.place += size
        return self._data[self.place - size : self.place]

    def _byte(self) -> int:
        value = self._data[self.place]
        self.place += 1
        return value

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while shift <= _MAX_SHIFT:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of more than 64 bits")


MAX_PAGE_BYTES: Final = 2**26
"""Limit for a decompressed page; writers exceed 1 MiB only for long texts."""

MAX_PAGES_BYTES: Final = 2**27
"""Limit for the long pages of all columns that are read at the same time."""

MAX_ROW_VALUES: Final = 2**22
"""Limit for the values in one row's lists in one column, on average over a row group."""

_MAX_FOOTER_BYTES = 2**22
_LENGTH_BYTES, _MAGIC_BYTES = 4, 4
_SMALL_BYTES = 2**22
_LONG_BYTES = 2**23
_MAX_RATIO = 100
_HEADER_BYTES = 2**10
_MAX_PAGES = 2**16


class Chunk(NamedTuple):
    """A column in a row group: its path and its entry in the footer."""

    path: tuple[str, ...]
    num_values: int
    unpacked: int
    packed: int
    start: int
    is_encrypted: bool


class Footer(NamedTuple):
    """The schema of a Parquet file, its number of rows, and the chunks of each row group.

    `first_group` has the entries of the columns of the first row group, as they are.
    """

    schema: Any
    num_rows: Any
    chunks: list[list[Chunk]]
    first_group: Any = ()

    def columns(self) -> list[str]:
        """Return the names of the columns; raises TableError for a damaged schema."""
        try:
            return [each[4].decode("utf-8", "replace") for each in self.top_elements()]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise TableError("The Parquet table is damaged: its schema cannot be read.") from exc

    def top_elements(self) -> Iterator[dict[int, Any]]:
        """Yield the columns in the schema, which lists the fields inside each after it."""
        left: list[int] = []  # numbers of elements to come, by level
        for element in self.schema:
            if len(left) == 1:
                yield element
            if left:
                left[-1] -= 1
            if num_children := element.get(5, 0):
                left.append(num_children)
            while len(left) > 1 and not left[-1]:
                left.pop()


def read_chunks(file: Any) -> list[list[Chunk]]:
    """Return the chunks of each row group; none for a footer that is too long or damaged."""
    footer = read_footer(file)
    return [] if footer is None else footer.chunks  # Arrow reports the damage


def read_footer(file: Any) -> Footer | None:
    """Return the footer at the end of a file; None if it is too long or damaged."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - _LENGTH_BYTES - _MAGIC_BYTES))
    num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if num_bytes > min(_MAX_FOOTER_BYTES, end):
        return None
    file.seek(end - _LENGTH_BYTES - _MAGIC_BYTES - num_bytes)
    try:
        footer = ThriftReader(file.read(num_bytes)).struct()
        chunks = [[_chunk(column) for column in group[1]] for group in footer.get(4, [])]
        first_group = footer[4][0][1] if footer.get(4) else ()
        return Footer(footer.get(2, []), footer.get(3, 0), chunks, first_group)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def check_chunks(
    file: BinaryFile, chunks: Sequence[Chunk], num_rows: int, columns: Sequence[str]
) -> int:
    """Return the bytes of the long pages of columns in a row group; 0 if all are short.

    Raises TableError for columns that need far more memory than their bytes. Pages of a large chunk
    are read only if its footer shows a high compression ratio.
    """
    requested, size = set(columns), 0
    for chunk in chunks:
        if chunk.path[:1] and chunk.path[0] in requested:
            size += _check_chunk(file, chunk, num_rows)
    if size > MAX_PAGES_BYTES:
        raise TableError(
            f"Columns of the table have pages of {size:,} bytes in total, more than "
            f"{MAX_PAGES_BYTES:,}: write the table with smaller pages."
        )
    return size


def probe_rows(chunks: Sequence[Chunk], num_rows: int, most: int) -> int:
    """Return a number of rows whose lists have a bounded number of values, on average."""
    num_values = max((chunk.num_values for chunk in chunks), default=0)
    return max(1, min(most, MAX_ROW_VALUES * num_rows // max(1, num_values)))


def _chunk(column: dict[int, Any]) -> Chunk:
    found = column.get(3, {})
    path = tuple(part.decode("utf-8", "replace") for part in found.get(3, ()))
    starts = [found[field] for field in (9, 11) if found.get(field, 0) > 0]
    num_values, unpacked, packed = (found.get(field, 0) for field in (5, 6, 7))
    start = min(starts, default=0)
    return Chunk(path, num_values, unpacked, packed, start, is_encrypted=8 in column)


def _check_chunk(file: BinaryFile, chunk: Chunk, num_rows: int) -> int:
    """Return the bytes of a chunk's longest page, 0 if all are short."""
    name = ".".join(chunk.path)
    if chunk.is_encrypted:
        raise TableError(f"Column `{name}` is encrypted: write the table without encryption.")
    if chunk.num_values > MAX_ROW_VALUES * max(1, num_rows):
        raise TableError(
            f"Column `{name}` has {chunk.num_values:,} values in {num_rows:,} rows: "
            "split its lists."
        )
    if chunk.packed > _SMALL_BYTES and chunk.unpacked < _MAX_RATIO * chunk.packed:
        return 0
    longest = max(_page_sizes(file, chunk), default=0)
    if longest > MAX_PAGE_BYTES:
        raise TableError(
            f"Column `{name}` has a page of {longest:,} bytes, more than {MAX_PAGE_BYTES:,}: write "
            "the table with smaller pages, or move its long texts to separate files."
        )
    return longest if longest > _LONG_BYTES else 0


def _page_sizes(file: BinaryFile, chunk: Chunk) -> Iterator[int]:
    """Yield the decompressed bytes of a chunk's pages, as far as their headers can be read."""
    start, end = chunk.start, chunk.start + chunk.packed
    for _ in range(_MAX_PAGES):
        if start >= end:
            return
        file.seek(start)
        reader = ThriftReader(file.read(_HEADER_BYTES))
        header: dict[int, Any] = {}
        with suppress(ValueError, LookupError):  # long statistics, which come after the sizes
            reader.struct(into=header)
        if not (isinstance(header.get(2), int) and isinstance(header.get(3), int)):
            return
        yield header[2]
        if not reader.is_complete:
            return
        start += reader.place + max(0, header[3])
