"""Result pack: stored replies as one immutable object, after an index sorted by key.

The index has 32 bytes per reply: its key, start and size, and a checksum of these. Each
reply is a record with a checksum of its key and itself. The name of the object contains the number
of replies, so that the index can be read alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple
from urllib.parse import quote, unquote
from zlib import crc32

from .result_key import KEY_BYTES, VERSION, Kept, Scope

_ENTRY: Final = Struct(f">{KEY_BYTES}sQII")
_PLACE_BYTES: Final = KEY_BYTES + 12
_MAX_START: Final = 2**62
_NAME: Final = re.compile(
    r"(?P<model>[^/]+)/(?P<scope>(?:\d+-)?[0-9a-f]+)/[^/]+\.(?P<num_results>\d{1,9})\.tidemill"
)
_MAX_MODEL_CHARS: Final = 200


class Entry(NamedTuple):
    """Place of a reply in a pack."""

    key: bytes
    start: int
    size: int


class PackName(NamedTuple):
    """The parts of a pack's name."""

    model: str
    num_results: int


def scope_folder(scope: Scope) -> str:
    """Return the folder of the packs of one scope, for this version only."""
    return f"{quote(scope.model, safe='')[-_MAX_MODEL_CHARS:]}/{VERSION}-{scope.digest.hex()}/"


def pack_name(scope: Scope, source: str, num_results: int) -> str:
    """Return the name of a pack under the prefix of a store; `source` is unique in it."""
    return f"{scope_folder(scope)}{source}.{num_results}.tidemill"


def parse_pack_name(name: str) -> PackName | None:
    """Parse the name of a pack; returns None for other objects."""
    match = _NAME.fullmatch(name)
    return match and PackName(unquote(match["model"]), int(match["num_results"]))


def encode_pack(replies: Mapping[bytes, Kept]) -> bytes:
    """Return the pack of these replies by key."""
    index, records, start = bytearray(), [], len(replies) * _ENTRY.size
    for key in sorted(replies):
        records.append(record := replies[key].sealed(key))
        entry = _ENTRY.pack(key, start, len(record), 0)[:_PLACE_BYTES]
        index += entry + crc32(entry).to_bytes(4, "big")
        start += len(record)
    return bytes(index) + b"".join(records)


def index_size(num_results: int) -> int:
    """Return the bytes of the index of a pack."""
    return num_results * _ENTRY.size


def decode_index(index: bytes) -> Iterator[Entry]:
    """Yield the entries of an index, without damaged or truncated ones."""
    whole = len(index) - len(index) % _ENTRY.size
    entries = _ENTRY.iter_unpack(memoryview(index)[:whole])
    for place, (key, start, size, checksum) in enumerate(entries):
        begin = place * _ENTRY.size
        if crc32(index[begin : begin + _PLACE_BYTES]) == checksum and start < _MAX_START:
            yield Entry(key, start, size)
