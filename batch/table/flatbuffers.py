"""FlatBuffers, as far as the headers of Arrow need them. Format: https://flatbuffers.dev/internals.

Bytes that are not a FlatBuffer raise struct.error, LookupError or ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Self


class FlatTable:
    """A table of a FlatBuffer; fields have numbers."""

    def __init__(self, data: bytes, place: int) -> None:
        self._data = data
        self._place = place
        fields = place - struct.unpack_from("<i", data, place)[0]
        self._fields, self._size = fields, struct.unpack_from("<H", data, fields)[0]

    @classmethod
    def root(cls, data: bytes) -> Self:
        """Return the table that contains all others."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def has(self, field: int) -> bool:
        """Say whether a field is set."""
        return self._offset(field) != 0

    def number(self, field: int, code: str, default: int = 0) -> int:
        """Return the number in a field, of a type of the struct module."""
        if not (offset := self._offset(field)):
            return default
        return int(struct.unpack_from(f"<{code}", self._data, self._place + offset)[0])

    def table(self, field: int) -> Self:
        """Return the table in a field; raises LookupError if it is not set."""
        return type(self)(self._data, self._target(field))

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole FlatBuffer."""
        return len(self._data)

    def text(self, field: int, max_bytes: int) -> str:
        """Return the text in a field, an empty one if it is not set; raises ValueError if longer.

        Several fields may share one text, so that their sum is not bounded by the bytes.
        """
        if not self.has(field):
            return ""
        place, size = self._vector(field)
        if size > max_bytes:
            raise ValueError("too much text")
        return self._data[place : place + size].decode("utf-8", "replace")

    def tables(self, field: int) -> Iterator[Self]:
        """Yield the tables of a list."""
        if not self.has(field):
            return
        place, number = self._vector(field)
        for each in range(place, place + 4 * number, 4):
            yield type(self)(self._data, each + struct.unpack_from("<I", self._data, each)[0])

    def structs(self, field: int, form: struct.Struct) -> Iterator[tuple[Any, ...]]:
        """Yield the structs, or numbers, of a list."""
        if not self.has(field):
            return
        place, number = self._vector(field)
        yield from form.iter_unpack(self._data[place : place + number * form.size])

    def _vector(self, field: int) -> tuple[int, int]:
        """Return the place of the first item of a list, and the number of items."""
        place = self._target(field)
        return place + 4, int(struct.unpack_from("<I", self._data, place)[0])

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
