"""Image headers: the pages of a TIFF, and the true sizes inside ICO and JPEG 2000 files.

These containers state a size that Pillow trusts, and contain an image that may be much larger.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_TIFF_STARTS: Final = {
    b"II*\0": ("<", False),
    b"MM\0*": (">", False),
    b"II+\0": ("<", True),
    b"MM\0+": (">", True),
}
# Bytes of a value by the number of its type; those of all others have one.
_VALUE_BYTES: Final = {
    3: 2,
    4: 4,
    5: 8,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_MAX_ENTRIES: Final = 4_096
_TILE_TAGS: Final = (322, 323)
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MAX_ICONS: Final = 256
_CODESTREAM: Final = b"\xff\x4f\xff\x51"
_MAX_TILES: Final = 4_096
_MAX_CHANNELS: Final = 4


class ImageRefused(Exception):
    """An unreadable image; the message follows the words "the image"."""


class Damaged(Exception):
    """A header that is not valid."""


def is_tiff(data: bytes) -> bool:
    """Say whether data is a TIFF, which may have several pages."""
    return data[:4] in _TIFF_STARTS


def looks_like_tiff(data: bytes) -> bool:
    """Say whether Pillow reads data as a TIFF, although its header may be wrong."""
    return data[:2] in (b"II", b"MM")


class _TiffForm(NamedTuple):
    """Byte order of a TIFF, and the formats of its counts and offsets."""

    order: str
    is_big: bool

    @property
    def offset(self) -> str:
        return f"{self.order}{'Q' if self.is_big else 'I'}"

    @property
    def entry_count(self) -> str:
        return f"{self.order}{'Q' if self.is_big else 'H'}"

    @property
    def entry(self) -> str:
        return f"{self.order}{'HHQQ' if self.is_big else 'HHII'}"

    @property
    def entry_bytes(self) -> int:
        return struct.calcsize(self.entry)


def count_pages(data: bytes, limit: int) -> int:
    """Return the number of pages of a TIFF, at most `limit` + 1; raises `Damaged`.

    Only directories are read. Their values must not be longer than the file: Pillow copies each
    value, so that many entries of the same bytes would fill the memory.
    """
    if not is_tiff(data):
        raise Damaged
    form = _TiffForm(*_TIFF_STARTS[data[:4]])
    position, num_bytes = 8 if form.is_big else 4, 0
    offsets: set[int] = set()
    try:
        while len(offsets) <= limit:
            [offset] = struct.unpack_from(form.offset, data, position)
            if not offset or offset in offsets:
                break
            [count] = struct.unpack_from(form.entry_count, data, offset)
            if count > _MAX_ENTRIES:
                raise Damaged
            offsets.add(offset)
            start = offset + struct.calcsize(form.entry_count)
            position = start + count * form.entry_bytes
            num_bytes += sum(
                size * _VALUE_BYTES.get(kind, 1)
                for _, kind, size, _ in struct.iter_unpack(form.entry, data[start:position])
            )
            if num_bytes > len(data):
                raise Damaged
    except struct.error as exc:
        if not offsets:
            raise Damaged from exc
        # Truncated: the pages so far are decoded, and the last one reports it.
    return max(1, len(offsets))


def check_tile(tags: object, max_pixels: int) -> None:
    """Raise `Damaged` if a TIFF's page has tiles that are larger than any image may be."""
    get = getattr(tags, "get", None)
    width, height = (get(tag, 0) for tag in _TILE_TAGS) if get is not None else (0, 0)
    if not isinstance(width, int) or not isinstance(height, int) or width * height > max_pixels:
        raise Damaged


def is_icon(data: bytes) -> bool:
    """Say whether data is an ICO."""
    return data.startswith(b"\0\0\1\0")


def icon_size(data: bytes) -> tuple[int, int]:
    """Return the size of the largest image in an ICO; raises `Damaged`."""
    try:
        [count] = struct.unpack_from("<4xH", data)
        if not 0 < count <= _MAX_ICONS:
            raise Damaged
        places = (struct.unpack_from("<2I", data, 6 + 16 * i + 8) for i in range(count))
        sizes = [_size_in_icon(data, place) for _, place in places]
    except struct.error as exc:
        raise Damaged from exc
    return max(sizes, key=lambda size: size[0] * size[1])


def _size_in_icon(data: bytes, place: int) -> tuple[int, int]:
    if data.startswith(_PNG, place):
        width, height = struct.unpack_from(">2I", data, place + 16)
        return width, height
    width, height = struct.unpack_from("<2i", data, place + 4)
    return abs(width), abs(height) // 2  # the mask is stored below the image


def check_codestream(data: bytes, size: tuple[int, int]) -> None:
    """Raise `Damaged` unless a JPEG 2000 codestream has the size that its file states.

    It must not have more tiles or channels than images have, because each takes memory.
    """
    try:
        start = _codestream_start(data)
        if not data.startswith(_CODESTREAM, start):
            raise Damaged
        fields = struct.unpack_from(">8IH", data, start + 8)
    except struct.error as exc:
        raise Damaged from exc
    right, bottom, left, top, width, height, tiles_left, tiles_top, channels = fields
    if (right - left, bottom - top) != size or not (width and height and channels):
        raise Damaged
    columns, rows = -(-(right - tiles_left) // width), -(-(bottom - tiles_top) // height)
    if columns * rows > _MAX_TILES or channels > _MAX_CHANNELS:
        raise Damaged


def _codestream_start(data: bytes) -> int:
    """Return where the codestream begins: at once, or in a box of a JP2 file."""
    if data.startswith(_CODESTREAM):
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
