"""AVIF headers: the sizes that the coded images state, which may be above the container's.

The decoder allocates the memory of the coded size, and scales its image to the container's. Only
the form of a still image is supported: coded images in one piece, without grids. An animation has
a still image too, its first frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from .image_headers import Damaged, ImageRefused

_CODED: Final = b"av01"
_OTHER_ITEMS: Final = {b"Exif", b"mime", b"uri "}
_SEQUENCE_HEADER: Final = 1
_TRACKS: Final = b"moov"
_MAX_ITEMS: Final = 64
_UNIQUE: Final = {b"meta", b"iinf", b"iloc", b"idat"}


def coded_size(data: bytes) -> tuple[int, int]:
    """Return the largest width and height of the coded images in an AVIF; raises `Damaged`."""
    try:
        boxes = dict(_boxes(data, 0, len(data)))
        start, end = boxes[b"meta"]
        if _TRACKS in boxes:
            raise Damaged
        inner = dict(_boxes(data, start + 4, end))
        coded = _coded_items(data, *inner[b"iinf"])
        idat = inner.get(b"idat", (0, 0))
        places = _places(data, *inner[b"iloc"], idat[0])
        if sum(size for extents in places.values() for _, size in extents) > len(data):
            raise Damaged
        sizes = []
        for item in coded:
            [(offset, size)] = places[item]
            sizes += _sequence_sizes(data[offset : offset + size])
    except (struct.error, KeyError, ValueError, IndexError) as exc:
        raise Damaged from exc
    if not sizes:
        raise Damaged
    return max(width for width, _ in sizes), max(height for _, height in sizes)


def still_avif(data: bytes) -> bytes:
    """Return an animated AVIF without its brand and its track, and other data as it is.

    The decoder reads the track of a file with that brand, and otherwise the still image. Raises
    `ImageRefused` for an animation without a still image.
    """
    if data[4:8] != b"ftyp":
        return data
    try:
        boxes = [*_boxes(data, 0, len(data))]
    except (struct.error, Damaged):
        return data  # `coded_size` rejects it
    contents = [content for kind, (content, _) in boxes if kind == _TRACKS]
    if not contents:
        return data
    if b"meta" not in dict(boxes):
        raise ImageRefused("is an animated AVIF without a still image: convert it to GIF or PNG")
    still, (start, end) = bytearray(data), boxes[0][1]
    still[start:end] = still[start:end].replace(b"avis", b"avif")
    for content in contents:
        start = still.rindex(_TRACKS, 0, content)
        still[start : start + len(_TRACKS)] = b"free"
    return bytes(still)


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Yield the boxes in a range, with the start and end of their content; none comes twice."""
    seen = set[bytes]()
    while start < end:
        length, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if length == 1:
            [length] = struct.unpack_from(">Q", data, start + 8)
            header = 16
        length = length or end - start
        if length < header or start + length > end or (kind in seen and kind in _UNIQUE):
            raise Damaged
        seen.add(kind)
        yield kind, (start + header, start + length)
        start += length


def _coded_items(data: bytes, start: int, end: int) -> list[int]:
    """Return the items of `iinf` that are coded images."""
    coded, position = [], start + (6 if data[start] == 0 else 8)
    for number, (kind, (at, _)) in enumerate(_boxes(data, position, end)):
        if kind != b"infe" or number == _MAX_ITEMS:
            raise Damaged
        form = {2: ">H2x4s", 3: ">I2x4s"}[data[at]]
        item, name = struct.unpack_from(form, data, at + 4)
        if name == _CODED:
            coded.append(item)
        elif name not in _OTHER_ITEMS:
            raise Damaged
    return coded


def _places(data: bytes, start: int, end: int, idat: int) -> dict[int, list[tuple[int, int]]]:
    """Return the extents, offsets in the file and sizes, of the items of `iloc`."""
    reader = _Reader(data[start:end])
    version = reader.number(8)
    reader.number(24)
    offset_bits, length_bits, base_bits, index_bits = (reader.number(4) * 8 for _ in range(4))
    places: dict[int, list[tuple[int, int]]] = {}
    for _ in range(reader.number(32 if version == 2 else 16)):
        item = reader.number(32 if version == 2 else 16)
        method = reader.number(16) & 15 if version else 0
        reader.number(16)
        base = reader.number(base_bits) + (idat if method == 1 else 0)
        if method > 1 or item in places:
            raise Damaged
        places[item] = []
        for _ in range(reader.number(16)):
            reader.number(index_bits if version else 0)
            offset = base + reader.number(offset_bits)
            places[item].append((offset, reader.number(length_bits)))
    return places


def _sequence_sizes(item: bytes) -> list[tuple[int, int]]:
    """Return the sizes in the sequence headers of a coded image, which begins with one."""
    sizes, position = [], 0
    while position < len(item):
        head = item[position]
        position += 2 if head & 4 else 1
        size = len(item) - position
        if head & 2:
            size = shift = 0
            while True:
                byte = item[position]
                position += 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        if head & 128 or position + size > len(item):
            raise Damaged
        if head >> 3 & 15 == _SEQUENCE_HEADER:
            sizes.append(_sequence_size(_Reader(item[position : position + size])))
        position += size
    if not sizes:
        raise Damaged
    return sizes


def _sequence_size(reader: _Reader) -> tuple[int, int]:
    """Return the largest size of a frame by its sequence header."""
    reader.number(4)
    is_reduced = reader.number(1)
    if is_reduced:
        reader.number(5)
    else:
        if reader.number(1):  # timing: not of still images
            raise Damaged
        has_delay = reader.number(1)
        for _ in range(reader.number(5) + 1):
            reader.number(12)
            if reader.number(5) > 7:
                reader.number(1)
            if has_delay and reader.number(1):
                reader.number(4)
    width_bits, height_bits = reader.number(4) + 1, reader.number(4) + 1
    width, height = reader.number(width_bits) + 1, reader.number(height_bits) + 1
    # Otherwise each frame may state another size in as many bits.
    return (width, height) if is_reduced else (1 << width_bits, 1 << height_bits)


class _Reader:
    """Reads numbers of bits; raises IndexError at the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def number(self, bits: int) -> int:
        """Return the next number."""
        start, self._position = self._position, self._position + bits
        if self._position > 8 * len(self._data):
            raise IndexError
        first, last = start // 8, -(-self._position // 8)
        found = int.from_bytes(self._data[first:last]) >> (8 * last - self._position)
        return found & ((1 << bits) - 1)
