"""Sizes of Parquet's pages, read from their headers before a page is decompressed.

A page of some kilobytes may decompress to gigabytes, and a list of one row may have any number of
values. A file's footer counts values; sizes of single pages are in their headers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..file.formats import BinaryFile
from .errors import TableError

MAX_PAGE_BYTES: Final = 2**26
"""Most bytes of a decompressed page; writers make longer ones than 1 MiB for long texts only."""

MAX_PAGES_BYTES: Final = 2**27
"""Most bytes of the long pages of all columns that are read at the same time."""

MAX_ROW_VALUES: Final = 2**22
"""Most values that the lists of one row may have in one column, on average over a row group."""

_SMALL_BYTES = 2**22
_LONG_BYTES = 2**23
_MAX_RATIO = 100
_HEADER_BYTES = 2**10
_MAX_PAGES = 2**16
# Types of Thrift's compact protocol.
_BOOLEANS, _BYTE, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, 7, 8, (9, 10), 11, 12
_MAX_DEPTH = 16


class _PageSize(NamedTuple):
    """Sizes of a page: of its header, packed, and unpacked."""

    header: int
    packed: int
    unpacked: int


def check_chunk(file: BinaryFile, chunk: Any, num_rows: int, *, is_repeated: bool) -> int:
    """Return the bytes of a chunk's longest page, 0 where all are short.

    Raises TableError for a chunk of a column that takes far more memory than its bytes. Pages of a
    large chunk are read only where its footer says that it is packed tightly.
    """
    name = chunk.path_in_schema
    if is_repeated and chunk.num_values > MAX_ROW_VALUES * max(1, num_rows):
        raise TableError(
            f"Column `{name}` has {chunk.num_values:,} values in {num_rows:,} rows: "
            "split its lists."
        )
    packed, unpacked = chunk.total_compressed_size, chunk.total_uncompressed_size
    longest = 0
    if packed > _SMALL_BYTES and unpacked < _MAX_RATIO * packed:
        return longest
    for page in _pages(file, chunk):
        longest = max(longest, page.unpacked)
        if page.unpacked > MAX_PAGE_BYTES:
            raise TableError(
                f"Column `{name}` has a page of {page.unpacked:,} bytes, more than "
                f"{MAX_PAGE_BYTES:,}: write the table with smaller pages, or its long texts to "
                "files of their own."
            )
    return longest if longest > _LONG_BYTES else 0


def _pages(file: BinaryFile, chunk: Any) -> Iterator[_PageSize]:
    """Yield the sizes of a chunk's pages, as far as their headers can be read."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        start = min(start, chunk.dictionary_page_offset)
    end = start + chunk.total_compressed_size
    for _ in range(_MAX_PAGES):
        if start >= end:
            return
        file.seek(start)
        try:
            page = _HeaderReader(file.read(_HEADER_BYTES)).page_size()
        except (IndexError, KeyError):
            return  # a header with long statistics, or one that Arrow refuses
        yield page
        start += page.header + max(0, page.packed)


class _HeaderReader:
    """Reader of a page's header in Thrift's compact protocol; raises IndexError at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def page_size(self) -> _PageSize:
        """Read a header."""
        numbers = {}
        for field, kind in self._fields():
            if kind in {5, 6} and field in {2, 3}:
                number = self._varint()
                numbers[field] = (number >> 1) ^ -(number & 1)
            else:
                self._skip(kind, 0)
        return _PageSize(self._place, numbers[3], numbers[2])

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a struct."""
        field = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            if delta:
                field += delta
            else:
                number = self._varint()
                field = (number >> 1) ^ -(number & 1)
            yield field, kind

    def _skip(self, kind: int, depth: int) -> None:
        if kind in _BOOLEANS or depth > _MAX_DEPTH:
            return
        if kind == _BYTE:
            self._place += 1
        elif kind == _DOUBLE:
            self._place += 8
        elif kind == _BINARY:
            self._place += self._varint()
        elif kind in _LISTS:
            self._skip_list(depth)
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        elif kind == _MAP:
            raise KeyError(kind)  # no header has one
        else:
            self._varint()

    def _skip_list(self, depth: int) -> None:
        head = self._byte()
        size, kind = head >> 4, head & 15
        for _ in range(self._varint() if size == 15 else size):
            self._skip(_BYTE if kind in _BOOLEANS else kind, depth + 1)

    def _byte(self) -> int:
        value = self._data[self._place]
        self._place += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
