"""Image headers: the pages of a TIFF, and the true sizes inside an ICO.

Such containers state a size that Pillow trusts, and contain an image that may be much larger.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, NamedTuple

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
_MAX_DIRECTORIES: Final = 20_000
_SUBFILE_TAG: Final = 254
_NOT_PAGES: Final = 1 | 4  # a smaller version of another image, a mask
_TILE_TAGS: Final = (322, 323)
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_FIRST_CHUNK: Final = b"\0\0\0\rIHDR"
_MAX_ICONS: Final = 256


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

    def is_no_page(self, kind: int, _size: int, value: int) -> bool:
        """Say whether a directory is not of a page, by its entry of that."""
        order: Literal["little", "big"] = "little" if self.order == "<" else "big"
        used = value.to_bytes(8 if self.is_big else 4, order)[: _VALUE_BYTES.get(kind, 1)]
        return bool(int.from_bytes(used, order) & _NOT_PAGES)


def page_directories(data: bytes, limit: int) -> list[int]:
    """Return the places of a TIFF's pages among its directories, at most `limit` + 1 of them.

    The others are thumbnails and masks. Only directories are read; raises `Damaged`. Their values
    must not be longer than the file: Pillow copies each value, so that many entries of the same
    bytes would fill the memory.
    """
    if not is_tiff(data):
        raise Damaged
    form = _TiffForm(*_TIFF_STARTS[data[:4]])
    position, num_bytes = 8 if form.is_big else 4, 0
    offsets: set[int] = set()
    pages: list[int] = []
    try:
        while len(pages) <= limit:
            [offset] = struct.unpack_from(form.offset, data, position)
            if not offset or offset in offsets:
                break
            [count] = struct.unpack_from(form.entry_count, data, offset)
            if count > _MAX_ENTRIES or len(offsets) == _MAX_DIRECTORIES:
                raise Damaged
            start = offset + struct.calcsize(form.entry_count)
            position = start + count * form.entry_bytes
            entries = [*struct.iter_unpack(form.entry, data[start:position])]
            num_bytes += sum(size * _VALUE_BYTES.get(kind, 1) for _, kind, size, _ in entries)
            if not any(tag == _SUBFILE_TAG and form.is_no_page(*rest) for tag, *rest in entries):
                pages.append(len(offsets))
            offsets.add(offset)
            if num_bytes > len(data):
                raise Damaged
    except struct.error as exc:
        if not offsets:
            raise Damaged from exc
        # Truncated: the pages so far are decoded, and the last one reports it.
    return pages or [0]


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
        if data[place + 8 : place + 16] != _FIRST_CHUNK:  # Pillow reads it wherever it comes
            raise Damaged
        width, height = struct.unpack_from(">2I", data, place + 16)
        return width, height
    width, height = struct.unpack_from("<2i", data, place + 4)
    return abs(width), abs(height) // 2  # the mask is stored below the image
