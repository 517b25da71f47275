"""First bytes of LZ4 frames, whose blocks may refer to those before them.

Format: https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md.
"""

from __future__ import annotations

import struct
from typing import Final

_MAGIC: Final = b"\x04\x22\x4d\x18"
_HAS_SIZE, _HAS_DICTIONARY, _HAS_CHECKSUMS = 8, 1, 16
_STORED: Final = 2**31
_LONG: Final = 15
_MIN_COPY: Final = 4


def unpack_frame(data: bytes, num_bytes: int) -> bytes:
    """Return the first bytes of a frame, which may be cut; raises ValueError and IndexError."""
    if data[:4] != _MAGIC:
        raise ValueError("not an LZ4 frame")
    flags = data[4]
    place = 7 + (8 if flags & _HAS_SIZE else 0) + (4 if flags & _HAS_DICTIONARY else 0)
    found = bytearray()
    while len(found) < num_bytes:
        [size] = struct.unpack("<I", data[place : place + 4])
        if not size:
            break
        block = data[place + 4 : place + 4 + (size & (_STORED - 1))]
        if size & _STORED:
            found += block
        else:
            unpack_block(block, found, num_bytes)
        place += 4 + (size & (_STORED - 1)) + (4 if flags & _HAS_CHECKSUMS else 0)
    return bytes(found[:num_bytes])


def unpack_block(block: bytes, found: bytearray, num_bytes: int) -> None:
    """Append bytes of a block until there are `num_bytes`; raises ValueError and IndexError."""
    place = 0
    while place < len(block) and len(found) < num_bytes:
        token = block[place]
        size, place = _length(block, place + 1, token >> 4)
        found += block[place : place + size]
        place += size
        if place >= len(block) or len(found) >= num_bytes:
            return
        offset, place = block[place] | block[place + 1] << 8, place + 2
        size, place = _length(block, place, token & _LONG)
        size = min(size + _MIN_COPY, num_bytes - len(found))
        if not 0 < offset <= len(found):
            raise ValueError("a copy of bytes that are not there")
        piece = found[len(found) - offset : len(found) - offset + size]
        found += (piece * (size // len(piece) + 1))[:size]


def _length(block: bytes, place: int, short: int) -> tuple[int, int]:
    """Return a length and the place after it; a long one is continued in further bytes."""
    if short < _LONG:
        return short, place
    while (byte := block[place]) == 255:
        short, place = short + byte, place + 1
    return short + byte, place + 1
