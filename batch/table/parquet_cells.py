"""First cells of a Parquet file's flat columns, read without Arrow, to show rendered prompts.

Texts, numbers and booleans are read, from plain and dictionary pages without compression or with
Snappy, gzip, LZ4 or zstd. Format: https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from .errors import NotReadHere
from .lz4 import unpack_block
from .parquet_sizes import Footer, ThriftReader
from .zstd import Work, unpack_frame

MAX_COLUMN_BYTES: Final = 2**19
"""Bytes at the start of a column that are needed at most."""

_MAX_PAGE_BYTES: Final = 2**22
_MAX_PAGES: Final = 8
_MAX_SHIFT: Final = 63
_NUM_CELLS: Final = 3
_BOOLEAN, _BYTE_ARRAY = 0, 6
_NUMBERS: Final[Mapping[int, struct.Struct]] = {
    kind: struct.Struct(code) for kind, code in ((1, "<i"), (2, "<q"), (4, "<f"), (5, "<d"))
}
_SIGNED: Final = {None, 15, 16, 17, 18}  # of the types that a schema names; the others are dates
_UTF8, _STRING, _INTEGER = 0, 1, 10
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3
_PLAIN, _RUNS, _DICTIONARIES = 0, 3, {2, 8}
_GZIP_WINDOW = 31
_DAMAGE: Final = (LookupError, ValueError, TypeError, AttributeError)
_ZSTD, _LZ4 = 6, 7
_READ_CODECS: Final = frozenset({0, 1, 2, _ZSTD, _LZ4})
_CODECS: Final = {3: "LZO", 4: "Brotli", 5: "an older LZ4"}


def first_bytes(footer: Footer, name: str) -> tuple[int, int]:
    """Return the range of bytes that a column's first cells are read from; raises NotReadHere."""
    column, _ = _column(footer, name)
    try:
        start = min(column[field] for field in (9, 11) if column.get(field, 0) > 0)
        return start, start + max(0, min(column[7], MAX_COLUMN_BYTES))
    except _DAMAGE as exc:
        raise NotReadHere(name, "the footer is damaged") from exc


def first_cells(footer: Footer, name: str, data: bytes) -> list[Any]:
    """Return the first cells of a column, at most three, from these bytes of it.

    Raises NotReadHere, also for damaged bytes.
    """
    column, element = _column(footer, name)
    try:
        pages = _pages(data[:MAX_COLUMN_BYTES], column[4])
        return [*islice(_cells(pages, column[1], is_optional=element.get(3) == 1), _NUM_CELLS)]
    except (*_DAMAGE, struct.error, zlib.error) as exc:
        raise NotReadHere(name, "its first page is too large or damaged") from exc


def _column(footer: Footer, name: str) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return the first chunk of a column, and its element of the schema."""
    try:
        path = [name.encode()]
        column = next(
            each[3] for each in footer.first_group if each[3][3] == path and 8 not in each
        )
        element = next(each for each in footer.top_elements() if each[4] == path[0])
    except (StopIteration, *_DAMAGE) as exc:
        raise NotReadHere(name, "it has nested values, or is encrypted") from exc
    kind, converted = column.get(1), element.get(6)
    logical = next(iter(element.get(10) or {}), None)
    is_text = kind == _BYTE_ARRAY and (converted == _UTF8 or logical == _STRING)
    is_number = kind in _NUMBERS and converted in _SIGNED and logical in {None, _INTEGER}
    if not (is_text or is_number or kind == _BOOLEAN) or element.get(3) == 2:
        raise NotReadHere(name, "its type is neither text nor a number")
    if (codec := column.get(4)) not in _READ_CODECS:
        raise NotReadHere(name, f"its compression is {_CODECS.get(codec, 'unknown')}")
    return column, element


def _pages(data: bytes, codec: int) -> Iterator[tuple[Mapping[int, Any], bytes, bytes]]:
    """Yield each page: its header, its levels if these are apart, and its decompressed values."""
    place, work = 0, Work()
    for _ in range(_MAX_PAGES):
        if place >= len(data):
            return
        reader = ThriftReader(data[place:])
        header = reader.struct()
        place += reader.place
        body = data[place : place + header[3]]
        place += header[3]
        if not 0 <= header[3] <= len(body) or header[2] > _MAX_PAGE_BYTES:
            raise ValueError("too large")
        levels = b""
        version_2 = header.get(8)
        if version_2 is not None:
            size = version_2[5] + version_2[6]
            levels, body = body[version_2[6] : size], body[size:]
        if version_2 is None or version_2.get(7, True):
            body = _unpacked(body, codec, header[2] - len(levels), work)
        yield header, levels, body


def _unpacked(data: bytes, codec: int, num_bytes: int, work: Work) -> bytes:
    if codec == 0:
        return data
    if codec == 1:
        return _unsnappy(data)
    if codec == _LZ4:
        found = bytearray()
        unpack_block(data, found, num_bytes)
        return bytes(found)
    if codec == _ZSTD:
        return unpack_frame(data, num_bytes, work)
    if num_bytes <= 0:
        return b""
    return zlib.decompressobj(_GZIP_WINDOW).decompress(data, num_bytes)


def _cells(
    pages: Iterator[tuple[Mapping[int, Any], bytes, bytes]], kind: int, *, is_optional: bool
) -> Iterator[Any]:
    words: list[Any] = []
    for header, levels, body in pages:
        if header[1] == _DICTIONARY_PAGE and not words:
            words = [*_plain(body, kind, header[7][1])]
        elif header[1] == _DATA_PAGE:
            size = 4 + int.from_bytes(body[:4], "little") if is_optional else 0
            about, encoding = header[5], header[5][2]
            yield from _values(
                about[1], encoding, body[4:size], body[size:], words=words, kind=kind
            )
        elif header[1] == _DATA_PAGE_2:
            about, encoding = header[8], header[8][4]
            yield from _values(about[1], encoding, levels, body, words=words, kind=kind)


def _values(
    num_cells: int, encoding: int, levels: bytes, body: bytes, *, words: list[Any], kind: int
) -> list[Any]:
    """Return the first cells of a page; without levels, none of its cells is null."""
    num_cells = min(_NUM_CELLS, num_cells)
    there = [*islice(_hybrid(levels, 1), num_cells)] if levels else [1] * num_cells
    if encoding == _PLAIN:
        found = [*_plain(body, kind, sum(there))]
    elif encoding in _DICTIONARIES:
        found = [words[index] for index in islice(_hybrid(body[1:], body[0]), sum(there))]
    elif encoding == _RUNS and kind == _BOOLEAN:
        found = [value == 1 for value in islice(_hybrid(body[4:], 1), sum(there))]
    else:
        raise ValueError(f"encoding {encoding}")
    found.reverse()
    return [found.pop() if is_there else None for is_there in there]


def _plain(data: bytes, kind: int, count: int) -> Iterator[Any]:
    """Yield values as they are: with their length if they are texts."""
    if kind == _BOOLEAN:
        yield from (bool(data[place // 8] >> place % 8 & 1) for place in range(count))
        return
    if kind in _NUMBERS:
        form = _NUMBERS[kind]
        yield from (form.unpack_from(data, place * form.size)[0] for place in range(count))
        return
    place = 0
    for _ in range(count):
        [size] = struct.unpack_from("<I", data, place)
        text = data[place + 4 : place + 4 + size]
        place += 4 + size
        if len(text) < size:
            raise ValueError("a truncated text")
        yield text.decode()


def _hybrid(data: bytes, width: int) -> Iterator[int]:
    """Yield whole numbers of `width` bits, in runs of one value or packed in groups of eight."""
    place, num_bytes = 0, (width + 7) // 8
    while place < len(data):
        head, place = _varint(data, place)
        if head & 1:
            size = (head >> 1) * width
            packed = int.from_bytes(data[place : place + size], "little")
            place += size
            yield from (packed >> at * width & (1 << width) - 1 for at in range((head >> 1) * 8))
            continue
        value = int.from_bytes(data[place : place + num_bytes], "little")
        place += num_bytes
        yield from (value for _ in range(head >> 1))


def _unsnappy(data: bytes) -> bytes:
    """Return decompressed bytes: literals, and copies of earlier bytes."""
    num_bytes, place = _varint(data, 0)
    if num_bytes > _MAX_PAGE_BYTES:
        raise ValueError("too large")
    found = bytearray()
    while place < len(data):
        tag, place = data[place], place + 1
        if tag & 3 == 0:
            size = tag >> 2
            if size >= 60:
                more = size - 59
                size, place = int.from_bytes(data[place : place + more], "little"), place + more
            found += data[place : place + size + 1]
            place += size + 1
            continue
        if tag & 3 == 1:
            size, offset = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[place]
            place += 1
        else:
            more = 2 if tag & 3 == 2 else 4
            size, offset = (tag >> 2) + 1, int.from_bytes(data[place : place + more], "little")
            place += more
        if not 0 < offset <= len(found) or len(found) + size > num_bytes:
            raise ValueError("a copy of bytes that are not there")
        start = len(found) - offset
        piece = found[start : start + size]
        found += (piece * (size // len(piece) + 1))[:size]
    if len(found) != num_bytes:
        raise ValueError("truncated")
    return bytes(found)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift <= _MAX_SHIFT:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError("a number of more than 64 bits")
