"""Parquet without Arrow: flat columns of texts, numbers and lists of numbers, in row groups.

A file is the row groups one after another between `MAGIC` and a footer. They can be written by
different processes: the footer contains the description of each, which `write_group` returns.
Pages are plain and compressed with gzip. Format: https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

MAGIC: Final = b"PAR1"

CellType = Literal["text", "whole", "number", "floats", "doubles"]
"""Type of a column: texts, 64-bit integers, doubles, or lists of 32-bit or 64-bit numbers."""

_PHYSICAL: Final = {"text": 6, "whole": 2, "number": 5, "floats": 4, "doubles": 5}
_CODES: Final = {"whole": "q", "number": "d", "floats": "f", "doubles": "d"}
_LISTS: Final = frozenset({"floats", "doubles"})
_REQUIRED, _OPTIONAL, _REPEATED = 0, 1, 2
_UTF8, _LIST, _STRING_TYPE, _LIST_TYPE = 0, 3, 1, 3
_PLAIN, _RLE, _DATA_PAGE, _GZIP = 0, 3, 0, 2
_GZIP_WINDOW, _LEVEL = 31, 1
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class Column(NamedTuple):
    """A column whose cells may be null."""

    name: str
    type: CellType


class RowGroup(NamedTuple):
    """The bytes of some rows, and their description for the footer."""

    data: bytes
    about: bytes


def write_group(columns: Sequence[Column], cells: Sequence[Sequence[Any]], start: int) -> RowGroup:
    """Return rows, given by column, for the place `start` of a file."""
    data, chunks, group_bytes = bytearray(), [], 0
    for column, values in zip(columns, cells, strict=True):
        place, page, num_values, num_unpacked = start + len(data), *_page(column, values)
        data += page
        group_bytes += num_unpacked
        about = _struct(
            (1, _i32(_PHYSICAL[column.type])),
            (2, _list([_i32(_PLAIN), _i32(_RLE)])),
            (3, _list([_text(name) for name in _path(column)])),
            (4, _i32(_GZIP)),
            (5, _i64(num_values)),
            (6, _i64(num_unpacked)),
            (7, _i64(len(page))),
            (9, _i64(place)),
        )
        chunks.append(_struct((2, _i64(place)), (3, about)))
    num_rows = len(cells[0]) if cells else 0
    group = _struct((1, _list(chunks)), (2, _i64(group_bytes)), (3, _i64(num_rows)))
    return RowGroup(bytes(data), group.data)


def write_footer(
    columns: Sequence[Column], num_rows: int, num_groups: int, num_group_bytes: int
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the descriptions of all row groups.

    `num_group_bytes` is the size of these descriptions.
    """
    schema = [_struct((4, _text("schema")), (5, _i32(len(columns))))]
    schema += [element for column in columns for element in _elements(column)]
    before = _struct((1, _i32(1)), (2, _list(schema)), (3, _i64(num_rows))).data[:-1]
    before += bytes([1 << 4 | 9]) + _list_head(num_groups, _STRUCT)
    after = bytes([2 << 4 | _BINARY]) + _text("tidemill").data + b"\0"
    num_bytes = len(before) + num_group_bytes + len(after)
    return before, after + num_bytes.to_bytes(4, "little") + MAGIC


def utf8(text: str) -> bytes:
    """Return a text as UTF-8, with U+FFFD for each unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text).encode()


def _path(column: Column) -> list[str]:
    return [column.name, "list", "element"] if column.type in _LISTS else [column.name]


def _elements(column: Column) -> list[_Value]:
    """Return a column in the schema; a list has three levels."""
    physical, name = _i32(_PHYSICAL[column.type]), _text(column.name)
    if column.type in _LISTS:
        return [
            _struct(
                *((3, _i32(_OPTIONAL)), (4, name), (5, _i32(1)), (6, _i32(_LIST))),
                (10, _struct((_LIST_TYPE, _struct()))),
            ),
            _struct((3, _i32(_REPEATED)), (4, _text("list")), (5, _i32(1))),
            _struct((1, physical), (3, _i32(_REQUIRED)), (4, _text("element"))),
        ]
    fields = [(1, physical), (3, _i32(_OPTIONAL)), (4, name)]
    if column.type == "text":
        fields += [(6, _i32(_UTF8)), (10, _struct((_STRING_TYPE, _struct())))]
    return [_struct(*fields)]


def _page(column: Column, cells: Sequence[Any]) -> tuple[bytes, int, int]:
    """Return a page with its header, its number of values, and its size without compression."""
    there = [cell for cell in cells if cell is not None]
    if column.type in _LISTS:
        sizes = [None if cell is None else len(cell) for cell in cells]
        repeats = [level for size in sizes for level in [0, *[1] * ((size or 1) - 1)]]
        levels = [
            level
            for size in sizes
            for level in ([0] if size is None else [1] if size == 0 else [2] * size)
        ]
        body = _levels(repeats) + _levels(levels)
        body += array(_CODES[column.type], [number for cell in there for number in cell]).tobytes()
    else:
        levels = [cell is not None for cell in cells]
        body = _levels(levels)
        if column.type == "text":
            texts = [utf8(cell) for cell in there]
            body += b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        else:
            body += array(_CODES[column.type], there).tobytes()
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    packed = packer.compress(body) + packer.flush()
    of_data = _struct(
        *((1, _i32(len(levels))), (2, _i32(_PLAIN)), (3, _i32(_RLE)), (4, _i32(_RLE))),
    )
    sizes_of_page = ((2, _i32(len(body))), (3, _i32(len(packed))))
    head = _struct((1, _i32(_DATA_PAGE)), *sizes_of_page, (5, of_data)).data
    return head + packed, len(levels), len(head) + len(body)


def _levels(levels: Sequence[int]) -> bytes:
    """Return levels below 256 as runs of one value, with their size."""
    found, place = bytearray(), 0
    while place < len(levels):
        end = place + 1
        while end < len(levels) and levels[end] == levels[place]:
            end += 1
        found += _varint((end - place) << 1) + bytes([levels[place]])
        place = end
    return len(found).to_bytes(4, "little") + found


# Thrift's compact protocol: a value is its type and its bytes.

_I32, _I64, _BINARY, _LIST_KIND, _STRUCT = 5, 6, 8, 9, 12
_LONG_LIST = 15


class _Value(NamedTuple):
    kind: int
    data: bytes


def _i32(number: int) -> _Value:
    return _Value(_I32, _varint(number << 1))


def _i64(number: int) -> _Value:
    return _Value(_I64, _varint(number << 1))


def _text(text: str) -> _Value:
    data = utf8(text)
    return _Value(_BINARY, _varint(len(data)) + data)


def _list(items: Sequence[_Value]) -> _Value:
    head = _list_head(len(items), items[0].kind if items else _STRUCT)
    return _Value(_LIST_KIND, head + b"".join(item.data for item in items))


def _list_head(size: int, kind: int) -> bytes:
    if size < _LONG_LIST:
        return bytes([size << 4 | kind])
    return bytes([_LONG_LIST << 4 | kind]) + _varint(size)


def _struct(*fields: tuple[int, _Value]) -> _Value:
    found, last = bytearray(), 0
    for number, value in fields:
        found += bytes([(number - last) << 4 | value.kind]) + value.data
        last = number
    return _Value(_STRUCT, bytes(found) + b"\0")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)
