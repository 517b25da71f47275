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
from .flatbuffers import FlatTable

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
        table = FlatTable.root(header)
        if message.type not in {"dictionary", "record batch"}:
            return 0
        batch = table.table(_HEADER)
        if message.type == "dictionary":
            batch = batch.table(_DATA)
        if not batch.has(_COMPRESSION):
            return 0
        view = memoryview(body)
        starts = (
            start for start, size in batch.structs(_BUFFERS, _BUFFER) if size >= _LENGTH_BYTES
        )
        return sum(max(0, int(struct.unpack_from("<q", view, start)[0])) for start in starts)
    except (struct.error, LookupError, TypeError, ValueError):
        return 0
