"""Decompressed sizes in a compressed Arrow file, from the headers of its messages.

A header is a FlatBuffer; a compressed buffer begins with its decompressed length.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from pyarrow import ipc

from .errors import TableError

MAX_BATCH_BYTES: Final = 2**30
"""Limit for a decompressed batch: the function that reads tables has 1,769 MiB of memory."""

_MAX_FILE_BYTES = 2**26
_MAGIC_BYTES = 8
_LENGTH_BYTES = 8
_BUFFER = struct.Struct("<qq")
# Field numbers in the FlatBuffers of a message, a dictionary and a record batch.
_HEADER, _DATA, _BUFFERS, _COMPRESSION = 2, 1, 2, 3


def check_batches(file: Any, *, is_stream: bool) -> None:
    """Raise TableError for a batch of a small file that decompresses to gigabytes.

    Large files are not checked, to avoid reading them twice.
    """
    if file.seek(0, io.SEEK_END) > _MAX_FILE_BYTES:
        return
    file.seek(0 if is_stream else _MAGIC_BYTES)
    for message in _messages(file):
        num_bytes = _unpacked_bytes(message)
        if num_bytes > MAX_BATCH_BYTES:
            raise TableError(
                f"A batch of the Arrow table decompresses to {num_bytes:,} bytes, more than "
                f"{MAX_BATCH_BYTES:,}: write it in smaller batches."
            )


def _messages(file: Any) -> Iterator[Any]:
    """Yield the messages of a file; Arrow's own reader reports a damaged one."""
    reader = ipc.MessageReader.open_stream(file)
    while True:
        try:
            yield reader.read_next_message()
        except (StopIteration, pa.ArrowException, OSError):
            return


def _unpacked_bytes(message: Any) -> int:
    """Return the decompressed bytes of a message's compressed buffers; 0 for other messages."""
    header, body = bytes(message.metadata), message.body
    try:
        table = _Table(header, struct.unpack_from("<I", header)[0])
        if message.type not in {"dictionary", "record batch"}:
            return 0
        batch = table.table(_HEADER)
        if message.type == "dictionary":
            batch = batch.table(_DATA)
        if not batch.has(_COMPRESSION):
            return 0
        view = memoryview(body)
        starts = (start for start, size in batch.buffers() if size >= _LENGTH_BYTES)
        return sum(max(0, int(struct.unpack_from("<q", view, start)[0])) for start in starts)
    except (struct.error, LookupError, TypeError, ValueError):
        return 0


class _Table:
    """A table of a FlatBuffer."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        fields = place - struct.unpack_from("<i", data, place)[0]
        self._fields, self._size = fields, struct.unpack_from("<H", data, fields)[0]

    def has(self, field: int) -> bool:
        """Say whether a field is set."""
        return self._offset(field) != 0

    def table(self, field: int) -> _Table:
        """Return the table in a field; raises LookupError if it is not set."""
        return _Table(self._data, self._target(field))

    def buffers(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the length of each buffer of a record batch."""
        place = self._target(_BUFFERS)
        [number] = struct.unpack_from("<I", self._data, place)
        end = place + 4 + number * _BUFFER.size
        yield from _BUFFER.iter_unpack(self._data[place + 4 : end])

    def _offset(self, field: int) -> int:
        place = 4 + 2 * field
        if place >= self._size:
            return 0
        return int(struct.unpack_from("<H", self._data, self._fields + place)[0])

    def _target(self, field: int) -> int:
        if not (offset := self._offset(field)):
            raise LookupError(field)
        place = self._place + offset
        return int(place + struct.unpack_from("<I", self._data, place)[0])
