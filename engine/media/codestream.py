"""JPEG 2000 codestreams: whether decoding one takes the memory of an image of its size.

Its parts, which are tiles, channels, precincts, code-blocks and layers, take memory by their
number, and a few bytes may state millions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from .image_headers import Damaged

_START: Final = b"\xff\x4f\xff\x51"
_COD, _COC, _SOT, _SOD, _EOC = 0xFF52, 0xFF53, 0xFF90, 0xFF93, 0xFFD9
_MAX_TILES: Final = 4_096
_MAX_PARTS: Final = 65_536
_MAX_CHANNELS: Final = 4
_MAX_LEVELS: Final = 32
# As powers of two: the least side of code-blocks, and that of precincts without a stated size.
_MIN_BLOCK: Final = 4
_WHOLE: Final = 15
# A precinct takes about 2 KiB.
_MAX_PRECINCTS: Final = 4_096
_PIXELS_PER_PRECINCT: Final = 256
# The table of packets has an entry for each layer of each precinct.
_PACKET_BYTES: Final = 2
_MAX_PACKET_BYTES_PER_PIXEL: Final = 4
_MAX_PACKET_BYTES: Final = 2**20


class _Grid(NamedTuple):
    """The pixels of an image, the size of its tiles, and its channels."""

    pixels: int
    width: int
    height: int
    channels: int


def check_codestream(data: bytes, size: tuple[int, int]) -> None:
    """Raise `Damaged` unless a codestream has the size that its file states, in common parts."""
    try:
        start = _codestream_start(data)
        if not data.startswith(_START, start):
            raise Damaged
        fields = struct.unpack_from(">8IH", data, start + 8)
        right, bottom, left, top, width, height, tiles_left, tiles_top, channels = fields
        if (right - left, bottom - top) != size or not (width and height and channels):
            raise Damaged
        columns, rows = -(-(right - tiles_left) // width), -(-(bottom - tiles_top) // height)
        if columns * rows > _MAX_TILES or channels > _MAX_CHANNELS:
            raise Damaged
        pixels = size[0] * size[1]
        grid = _Grid(pixels, min(width, size[0]), min(height, size[1]), channels)
        layers = 0
        for marker, segment in _segments(data, start + 2):
            if marker == _COD:
                layers = max(layers, *struct.unpack_from(">H", segment, 2))
                _check_parts(segment[0], segment[5:], grid, layers)
            elif marker == _COC:
                _check_parts(segment[1], segment[2:], grid, layers)
    except (struct.error, IndexError) as exc:
        raise Damaged from exc


def _segments(data: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield the markers of all headers, those of the parts of tiles included."""
    part = following = num_parts = 0
    while position < len(data):
        [marker] = struct.unpack_from(">H", data, position)
        if marker == _EOC and not part:
            return
        if marker == _SOD:
            if not part or not following:  # the last part
                return
            position, part = following, 0
            continue
        [length] = struct.unpack_from(">H", data, position + 2)
        if length < 2 or (following and not part and marker != _SOT):
            raise Damaged
        if marker == _SOT:
            [num_bytes] = struct.unpack_from(">I", data, position + 6)
            part, following = position, position + num_bytes if num_bytes else 0
            num_parts += 1
            if length != 10 or num_parts > _MAX_PARTS or 0 < num_bytes < 14:
                raise Damaged
        yield marker, data[position + 4 : position + 2 + length]
        position += 2 + length


def _check_parts(style: int, form: bytes, grid: _Grid, layers: int) -> None:
    """Raise `Damaged` for small code-blocks or precincts, or too many packets."""
    levels, block_width, block_height = form[:3]
    if levels > _MAX_LEVELS or min(block_width, block_height) + 2 < _MIN_BLOCK:
        raise Damaged
    stated = form[5 : 6 + levels] if style & 1 else bytes([_WHOLE * 17] * (levels + 1))
    if len(stated) != levels + 1:
        raise Damaged
    precincts = [
        ((grid.width >> level + (each & 15)) + 2) * ((grid.height >> level + (each >> 4)) + 2)
        for level, each in enumerate(reversed(stated))
    ]
    if sum(precincts) * grid.channels > _MAX_PRECINCTS + grid.pixels // _PIXELS_PER_PRECINCT:
        raise Damaged
    packets = max(precincts) * grid.channels * (levels + 1) * (layers + 1)
    if packets * _PACKET_BYTES > _MAX_PACKET_BYTES + _MAX_PACKET_BYTES_PER_PIXEL * grid.pixels:
        raise Damaged


def _codestream_start(data: bytes) -> int:
    """Return where the codestream begins: at once, or in a box of a JP2 file."""
    if data.startswith(_START):
        return 0
    position = 0
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        header = 8
        if length == 1:
            [length] = struct.unpack_from(">Q", data, position + 8)
            header = 16
        if kind == b"jp2c":
            return position + header
        if length < header:  # 0: the box is the last one
            raise Damaged
        position += length
