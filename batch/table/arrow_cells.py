"""Columns and first cells of an Arrow file or stream, read without Arrow, to show prompts.

Texts, numbers and booleans of the first batch are read, without compression, with LZ4 or
zstd. Only the bytes that are needed are read.
Format: https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from . import lz4, zstd
from .detection import ARROW_FILE
from .errors import NotReadHere, TableError
from .flatbuffers import FlatTable

ReadBytes = Callable[[int, int], bytes]
"""Returns the bytes of a file from one place to before another, fewer at its end."""

_CONTINUATION: Final = 0xFFFFFFFF
_FILE_START: Final = 8
_MAX_HEADER_BYTES: Final = 2**20
_MAX_TEXT_BYTES: Final = 2**18
_MAX_UNPACKED_BYTES: Final = 2**22
_MAX_MESSAGES: Final = 1_000
_MAX_FIELDS: Final = 20_000
_MAX_DEPTH: Final = 64
_LZ4, _ZSTD = 0, 1
_ROOM: Final = {_LZ4: 2**10, _ZSTD: zstd.MAX_BLOCK_BYTES + 2**10}
"""Bytes behind the compressed form of others, with which these can be decompressed."""

_BLOCK: Final = struct.Struct("<qi4xq")
_FOOTER_BYTES: Final = struct.Struct("<i6x")
_DAMAGE: Final = (struct.error, LookupError, ValueError)
# Numbers of the format: kinds of messages, fields of tables, types.
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_KIND, _HEADER, _BODY_BYTES = 1, 2, 3
_NAME, _TYPE_KIND, _TYPE, _DICTIONARY_OF, _CHILDREN = 0, 2, 3, 4, 5
_LENGTH, _BUFFERS, _COMPRESSION, _VARIADIC = 0, 2, 3, 4
_BATCHES: Final = 3
_NULL, _INT, _FLOAT, _TEXT, _BOOL, _LARGE_TEXT, _TEXT_VIEW = 1, 2, 3, 5, 6, 20, 24
_WITH_TWO: Final = frozenset({_INT, _FLOAT, _BOOL, 7, 8, 9, 10, 11, 15, 18})
_WITH_THREE: Final = frozenset({_TEXT, _LARGE_TEXT, 4, 19})
_NESTED: Final = {12: 2, 21: 2, 17: 2, 13: 1, 16: 1}  # lists and maps, structs and fixed lists
_VIEWS: Final = frozenset({_TEXT_VIEW, 23})
_INTS: Final = {8: "B", 16: "H", 32: "I", 64: "Q"}
_FLOATS: Final = {1: "f", 2: "d"}
_BUFFER: Final = struct.Struct("<qq")
_COUNT: Final = struct.Struct("<q")
_VIEW: Final = struct.Struct("<i4sii")
_INLINE_BYTES: Final = 12

_Message: TypeAlias = tuple[int, FlatTable, int, int]


class _Field(NamedTuple):
    name: str
    kind: int
    type: FlatTable | None
    is_dictionary: bool
    children: list[_Field]


class _Batch(NamedTuple):
    """The first batch: its number of rows, the place of its body, and its buffers in it."""

    num_rows: int
    body: int
    buffers: list[tuple[int, int]]
    variadic: list[int]
    codec: int | None


class ArrowCells:
    """The columns of an Arrow table, and the first cells of each.

    In a file of `num_bytes`, the footer names the first rows if dictionaries precede them.

    Raises TableError for a table that ends within its schema.
    """

    def __init__(self, read: ReadBytes, num_bytes: int) -> None:
        self._read, self._num_bytes, self._work = read, num_bytes, zstd.Work()
        self._is_file = read(0, len(ARROW_FILE)) == ARROW_FILE
        start = _FILE_START if self._is_file else 0
        try:
            found = self._message(start)
            if found is None or found[0] != _SCHEMA:
                raise ValueError("no schema")
            _, header, self._start, _ = found
            self._num_fields, self._name_bytes = 0, header.num_bytes
            self._fields: list[_Field] | None = [*self._fields_of(header, 1)]
        except _Truncated as exc:
            raise TableError(
                "The Arrow table is truncated: it ends within its schema. Write it again."
            ) from exc
        except _DAMAGE:
            self._fields = None

    @property
    def names(self) -> list[str] | None:
        """Return the names of the columns; None for a schema that cannot be read here."""
        return None if self._fields is None else [field.name for field in self._fields]

    def first(self, name: str, count: int) -> list[Any]:
        """Return the first cells of a column; raises NotReadHere."""
        fields = self._fields or []
        place = [field.name for field in fields].index(name)
        try:
            batch = self._first_batch()
            first = sum(_num_buffers(each, batch.variadic) for each in fields[:place])
            return self._cells(fields[place], batch, first, min(count, batch.num_rows))
        except _DAMAGE as exc:
            raise NotReadHere(name, str(exc) if type(exc) is _Reason else "it is damaged") from exc

    def _message(self, place: int) -> _Message | None:
        """Return the kind of a message, its header, and where its body begins and ends.

        The format had no mark before the size until version 0.15.
        """
        mark, size = struct.unpack("<Ii", self._read_all(place, place + 8))
        start = place + 8
        if mark != _CONTINUATION:
            start, size = place + 4, mark
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise ValueError("no message")
        if not size:
            return None
        body = start + size
        table = FlatTable.root(self._read_all(start, body))
        num_bytes = table.number(_BODY_BYTES, "q")
        if num_bytes < 0:
            raise ValueError("no message")
        return table.number(_KIND, "B"), table.table(_HEADER), body, body + num_bytes

    def _read_all(self, start: int, end: int) -> bytes:
        data = self._read(start, end)
        if len(data) < end - start:
            raise _Truncated(f"the table ends before byte {end:,}")
        return data

    def _fields_of(self, table: FlatTable, field: int, depth: int = 0) -> Iterator[_Field]:
        for each in table.tables(field):
            self._num_fields += 1
            if depth > _MAX_DEPTH or self._num_fields > _MAX_FIELDS:
                raise ValueError("too many fields")
            name = each.text(_NAME, self._name_bytes)
            self._name_bytes -= len(name)
            yield _Field(
                name,
                each.number(_TYPE_KIND, "B"),
                each.table(_TYPE) if each.has(_TYPE) else None,
                each.has(_DICTIONARY_OF),
                [*self._fields_of(each, _CHILDREN, depth + 1)],
            )

    def _first_batch(self) -> _Batch:
        for kind, header, body, _ in islice(self._messages(), _MAX_MESSAGES):
            num_rows = header.number(_LENGTH, "q")
            if kind == _BATCH and num_rows > 0:
                codec = None
                if header.has(_COMPRESSION):
                    codec = header.table(_COMPRESSION).number(0, "b")
                variadic = [count for (count,) in header.structs(_VARIADIC, _COUNT)]
                buffers: list[Any] = [*header.structs(_BUFFERS, _BUFFER)]
                return _Batch(num_rows, body, buffers, variadic, codec)
        raise _Reason("the table has no rows")

    def _messages(self) -> Iterator[_Message]:
        """Yield the messages after the schema; of a file with dictionaries only the batches."""
        place = self._start
        while (found := self._message(place)) is not None:
            if self._is_file and found[0] == _DICTIONARY:
                yield from filter(None, map(self._message, self._batch_places()))
                return
            yield found
            place = found[3]

    def _batch_places(self) -> list[int]:
        """Return the places of the batches, which the footer contains."""
        end = self._num_bytes - _FOOTER_BYTES.size
        [size] = _FOOTER_BYTES.unpack(self._read_all(end, self._num_bytes))
        if not 0 < size <= min(end, _MAX_HEADER_BYTES):
            raise _Reason("the footer of the table is too large or damaged")
        footer = FlatTable.root(self._read_all(end - size, end))
        places = [place for place, _, _ in footer.structs(_BATCHES, _BLOCK)]
        if places and not 0 <= min(places) <= max(places) < end:
            raise ValueError("a batch outside of the file")
        return places

    def _cells(self, field: _Field, batch: _Batch, first: int, count: int) -> list[Any]:
        def read(buffer: int, start: int, end: int) -> bytes:
            return self._bytes(batch, first + buffer, start, end)

        if field.is_dictionary or field.children:
            raise _Reason("it has nested values or a dictionary")
        if field.kind == _NULL:
            return [None] * count
        there, num_bytes = [1] * count, (count + 7) // 8
        if batch.buffers[first][1]:
            there = _bits(read(0, 0, num_bytes), count)
        found: list[Any]
        if field.kind == _BOOL:
            found = [bit == 1 for bit in _bits(read(1, 0, num_bytes), count)]
        elif field.kind in {_TEXT, _LARGE_TEXT}:
            form = struct.Struct(f"<{count + 1}{'i' if field.kind == _TEXT else 'q'}")
            ends = form.unpack(read(1, 0, form.size))
            data = read(2, ends[0], ends[-1])
            texts = (data[a - ends[0] : b - ends[0]] for a, b in pairwise(ends))
            found = [text.decode() for text in texts]
        elif field.kind == _TEXT_VIEW:
            views = _VIEW.iter_unpack(read(1, 0, _VIEW.size * count))
            found = [
                _viewed(view, read) if is_there else None
                for view, is_there in zip(views, there, strict=True)
            ]
        else:
            number = struct.Struct(f"<{count}{_code_of(field)}")
            found = [*number.unpack(read(1, 0, number.size))]
        return [cell if is_there else None for cell, is_there in zip(found, there, strict=True)]

    def _bytes(self, batch: _Batch, buffer: int, start: int, end: int) -> bytes:
        """Return bytes of a buffer of a batch, which may be compressed."""
        place, size = batch.buffers[buffer]
        if min(place, size) < 0 or not 0 <= start <= end <= start + _MAX_TEXT_BYTES:
            raise _Reason("its first texts are too long or damaged")
        if batch.codec is None:
            return self._read(batch.body + place + start, batch.body + place + min(end, size))
        if batch.codec not in _ROOM:
            raise _Reason("its compression is unknown")
        if end > _MAX_UNPACKED_BYTES:
            raise _Reason("its first texts are behind many others")
        if not size or start == end:
            return b""
        begin, num_packed = batch.body + place, min(size, 2 * end + _ROOM[batch.codec])
        data = self._read(begin, begin + num_packed)
        [num_bytes] = _COUNT.unpack_from(data)
        if num_bytes == -1:
            return data[8 + start : 8 + end]
        if batch.codec == _ZSTD:
            return zstd.unpack_frame(data[8:], end, self._work)[start:end]
        return lz4.unpack_frame(data[8:], end)[start:end]


class _Truncated(ValueError):
    """A table that ends within a message."""


class _Reason(ValueError):
    """Why a column cannot be read."""


def _num_buffers(field: _Field, variadic: list[int]) -> int:
    """Return the number of buffers of a column; raises a reason for other types.

    Those of texts in several buffers are taken from the list of their numbers.
    """
    if field.is_dictionary or field.kind in _WITH_TWO:
        return 2
    if field.kind == _NULL:
        return 0
    if field.kind in _WITH_THREE:
        return 3
    if field.kind in _VIEWS:
        return 2 + variadic.pop(0)
    if field.kind not in _NESTED:
        raise _Reason("another column has an unusual type")
    own = _NESTED[field.kind]
    return own + sum(_num_buffers(child, variadic) for child in field.children)


def _code_of(field: _Field) -> str:
    """Return the code of a number for the struct module."""
    code = None
    if field.kind == _INT and field.type is not None:
        code = _INTS.get(field.type.number(0, "i"))
        if code is not None and field.type.number(1, "B"):
            code = code.lower()
    elif field.kind == _FLOAT and field.type is not None:
        code = _FLOATS.get(field.type.number(0, "h"))
    if code is None:
        raise _Reason("its type is neither text nor a number")
    return code


def _bits(data: bytes, count: int) -> list[int]:
    return [data[place // 8] >> place % 8 & 1 for place in range(count)]


def _viewed(view: tuple[Any, ...], read: Callable[[int, int, int], bytes]) -> str:
    """Return a text that is in its view, or in one of the buffers after it."""
    size, prefix, buffer, start = view
    if size <= _INLINE_BYTES:
        return _VIEW.pack(size, prefix, buffer, start)[4 : 4 + max(0, size)].decode()
    return read(2 + buffer, start, start + size).decode()
