"""Result pack: kept replies as one object that is never changed, behind an index sorted by key.

The index has 32 bytes for each reply: its key, where it starts and ends, and its checksum. How many
there are is told by the name of the object, so that the index can be read alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple
from urllib.parse import quote, unquote
from zlib import crc32

from .result_key import KEY_BYTES, Kept, Scope

_ENTRY: Final = Struct(f">{KEY_BYTES}sQII")
_NAME: Final = re.compile(
    r"(?P<model>[^/]+)/(?P<scope>[0-9a-f]+)/[^/]+\.(?P<num_results>\d{1,9})\.tidemill"
)
_MAX_MODEL_CHARS: Final = 200


class Entry(NamedTuple):
    """Place of a reply in a pack."""

    key: bytes
    start: int
    size: int
    checksum: int


class PackName(NamedTuple):
    """What the name of a pack tells."""

    model: str
    num_results: int


def scope_folder(scope: Scope) -> str:
    """Return the folder of the packs of one scope."""
    return f"{quote(scope.model, safe='')[-_MAX_MODEL_CHARS:]}/{scope.digest.hex()}/"


def pack_name(scope: Scope, source: str, num_results: int) -> str:
    """Return the name of a pack below the prefix of a store; `source` is unique in it."""
    return f"{scope_folder(scope)}{source}.{num_results}.tidemill"


def parse_pack_name(name: str) -> PackName | None:
    """Return what the name of a pack tells; None for any other object's."""
    found = _NAME.fullmatch(name)
    return found and PackName(unquote(found["model"]), int(found["num_results"]))


def encode_pack(replies: Mapping[bytes, Kept]) -> bytes:
    """Return the pack of these replies by key."""
    index, bodies, start = bytearray(), [], len(replies) * _ENTRY.size
    for key in sorted(replies):
        digest, created, body = replies[key]
        bodies.append(record := b"%s %d %s" % (digest.encode(), created, body))
        index += _ENTRY.pack(key, start, len(record), crc32(record))
        start += len(record)
    return bytes(index) + b"".join(bodies)


def index_size(num_results: int) -> int:
    """Return the bytes of the index of a pack."""
    return num_results * _ENTRY.size


def decode_index(index: bytes) -> Iterator[Entry]:
    """Yield the entries of an index; of one that is cut short those that are whole."""
    whole = len(index) - len(index) % _ENTRY.size
    return map(Entry._make, _ENTRY.iter_unpack(memoryview(index)[:whole]))


def decode_reply(record: bytes, checksum: int) -> Kept | None:
    """Return the reply at an entry's place; None where there is another one, or none."""
    if crc32(record) != checksum:
        return None
    digest, _, rest = record.partition(b" ")
    created, _, body = rest.partition(b" ")
    return Kept(digest.decode(), int(created), body) if created.isdigit() else None
