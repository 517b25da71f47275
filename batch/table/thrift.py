"""Thrift's compact protocol, in which Parquet writes its footer and its pages' headers."""

from __future__ import annotations

from typing import Any

_TRUE, _FALSE, _BYTE, _INTS, _DOUBLE, _BINARY = 1, 2, 3, (4, 5, 6), 7, 8
_LISTS, _STRUCT = (9, 10), 12
_DOUBLE_BYTES = 8
_LONG_LIST = 15
_MAX_DEPTH = 32
_MAX_SHIFT = 63


class ThriftReader:
    """Reads values from bytes; raises IndexError at their end, ValueError for other data.

    `place` is the first byte that was not read; `is_complete` says whether a struct has ended.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0
        self.is_complete = False

    def struct(self, depth: int = 0, into: dict[int, Any] | None = None) -> dict[int, Any]:
        """Return the fields of a struct by their numbers, added to `into` as they are read."""
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        fields: dict[int, Any] = {} if into is None else into
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        self.is_complete = depth == 0
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTS:
            return self._signed()
        if kind in {_TRUE, _FALSE}:
            return kind == _TRUE
        if kind == _BINARY:
            return self._bytes(self._unsigned())
        if kind in _LISTS:
            head = self._byte()
            size = head >> 4 if head >> 4 < _LONG_LIST else self._unsigned()
            inner = _BYTE if head & 15 in {_TRUE, _FALSE} else head & 15
            return [self._value(inner, depth + 1) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _BYTE:
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(_DOUBLE_BYTES)
        raise ValueError(f"kind {kind}")

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self.place:
            raise IndexError(size)
        self.place += size
        return self._data[self.place - size : self.place]

    def _byte(self) -> int:
        value = self._data[self.place]
        self.place += 1
        return value

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)

    def _unsigned(self) -> int:
        value = shift = 0
        while shift <= _MAX_SHIFT:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("a number of more than 64 bits")
