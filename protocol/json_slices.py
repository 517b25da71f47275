"""Large JSON, parsed in slices, so that other threads run between the slices.

`from_json` holds the GIL from the first byte to the last: 35 MB take up to half a second, during
which no event loop of the process runs. Values, errors and duplicate keys are the same as
`from_json`'s; it still parses every value, in slices of up to `_SLICE_BYTES`.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple, NoReturn

from pydantic_core import from_json

_SLICE_BYTES = 2**18  # a few milliseconds
_MAX_SCALAR_BYTES = 2**16
_MAX_DEPTH = 200  # as in `from_json`
_PAUSE_SECONDS = 1e-4  # long enough for a waiting thread to get the GIL

_HEX = rb"[0-9a-fA-F]{4}"
_PAIR = rb"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = rb"(?:" + _PAIR + rb"|\\u(?![dD][89aAbB])" + _HEX + rb"|\\[^u])"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb"[\[{](?:[^\"\[\]{}]++|" + _STRING + rb")*+[\]}]"
_ITEM = rb"(?:[^\"\[\]{},]++|" + _STRING + rb"|" + _FLAT + rb")*+"

_WHITE_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[^\"\[\]{},: \t\r\n]*+")
_STRING_PIECE = re.compile(rb'[^"\\]*+(?:' + _ESCAPE + rb'[^"\\]*+)*+', re.DOTALL)
_FLAT_CONTAINER = re.compile(_FLAT, re.DOTALL)
_FLAT_ITEMS = re.compile(rb"(?:" + _ITEM + rb",)*+", re.DOTALL)
_PLACE = re.compile(r" at line (\d+) column (\d+)$")


class Slices(NamedTuple):
    """A JSON text and the options of `from_json`."""

    data: bytes
    options: dict[str, Any]

    def load(self) -> Any:
        """Return the parsed value; raises ValueError."""
        value, position = self._value(0, _MAX_DEPTH)
        position = self._skip_space(position)
        if position < len(self.data):
            self._fail("trailing characters", position)
        return value

    def _value(self, position: int, depth: int) -> tuple[Any, int]:
        """Return the value at a position, and the end of the value."""
        data, position = self.data, self._skip_space(position)
        first = data[position : position + 1]
        if first == b'"':
            return self._string(position + 1)
        if first in (b"[", b"{"):
            if not depth:
                self._fail("recursion limit exceeded", position)
            if found := _FLAT_CONTAINER.match(data, position, position + _SLICE_BYTES):
                return self._parsed(b"", position, found.end(), b""), found.end()
            return self._container(position, depth - 1)
        end = _end(_SCALAR.match(data, position, position + _MAX_SCALAR_BYTES), position)
        if end - position == _MAX_SCALAR_BYTES:
            self._fail("number out of range", position)
        return self._parsed(b"", position, max(end, position + 1), b""), end

    def _container(self, position: int, depth: int) -> tuple[list[Any] | dict[str, Any], int]:
        """Return the list or object that opens at a position, and its end."""
        opening = self.data[position : position + 1]
        closing = b"}" if opening == b"{" else b"]"
        holder: Any = {} if opening == b"{" else []
        position = self._skip_space(position + 1)
        if self.data[position : position + 1] == closing:
            return holder, position + 1
        while True:
            position = self._skip_space(position)
            if self.data[position : position + 1] == b",":
                self._fail("expected value", position)
            match = _FLAT_ITEMS.match(self.data, position, position + _SLICE_BYTES)
            if (end := _end(match, position)) > position:
                part = self._parsed(opening, position, end - 1, closing)
                holder.update(part) if opening == b"{" else holder.extend(part)
                position = end
                continue
            if opening == b"{":
                key, position = self._key(position)
                holder[key], position = self._value(position, depth)
            else:
                value, position = self._value(position, depth)
                holder.append(value)
            position = self._skip_space(position) + 1
            separator = self.data[position - 1 : position]
            if separator == closing:
                return holder, position
            if separator != b",":
                self._fail(f"expected `,` or `{closing.decode()}`", position - 1)

    def _key(self, position: int) -> tuple[str, int]:
        position = self._skip_space(position)
        if self.data[position : position + 1] != b'"':
            self._fail("key must be a string", position)
        key, position = self._string(position + 1)
        position = self._skip_space(position)
        if self.data[position : position + 1] != b":":
            self._fail("expected `:`", position)
        return key, position + 1

    def _string(self, position: int) -> tuple[str, int]:
        """Return the string whose content begins at a position, and its end."""
        data, pieces = self.data, list[str]()
        while data[position : position + 1] != b'"':
            end = self._end_of_piece(position)
            while end > position and data[end : end + 1] and data[end] & 0xC0 == 0x80:
                end -= 1  # a character of several bytes is not cut
            if end == position:  # neither an escape nor a character: its parser reports the reason
                end = min(len(data), position + 12)
            pieces.append(self._parsed(b'"', position, end, b'"'))
            position = end
            if position == len(data):
                self._fail("EOF while parsing a string", position)
        return "".join(pieces), position + 1

    def _end_of_piece(self, position: int) -> int:
        """Return the end of a piece of a string: before the quote, or between two escapes."""
        stop = position + _SLICE_BYTES
        quote = self.data.find(b'"', position, stop)
        if self.data.find(b"\\", position, stop if quote < 0 else quote) < 0:
            return min(stop, len(self.data)) if quote < 0 else quote
        return _end(_STRING_PIECE.match(self.data, position, stop), position)

    def _parsed(self, before: bytes, start: int, stop: int, behind: bytes) -> Any:
        """Return the value of a slice between two marks, and let other threads run."""
        time.sleep(_PAUSE_SECONDS)
        part = before + self.data[start:stop] + behind
        try:
            return from_json(part, **self.options)
        except ValueError as exc:
            reason, place = str(exc), _PLACE.search(str(exc))
            offset = 0
            if place is not None:
                reason = reason[: place.start()]
                for _ in range(int(place[1]) - 1):
                    offset = part.find(b"\n", offset) + 1
                offset += int(place[2]) - 1 - len(before)
            self._fail(reason, min(max(start + offset, start), len(self.data)))

    def _skip_space(self, position: int) -> int:
        end = position
        while True:
            end = _end(_WHITE_SPACE.match(self.data, position, position + _SLICE_BYTES), position)
            if end - position < _SLICE_BYTES:
                return end
            position = end

    def _fail(self, reason: str, position: int) -> NoReturn:
        line = self.data.count(b"\n", 0, position) + 1
        column = position - self.data.rfind(b"\n", 0, position)
        raise ValueError(f"{reason} at line {line} column {column}") from None


def load_in_slices(data: bytes, **options: Any) -> Any:
    """Return parsed JSON; raises ValueError. `options` are those of `from_json`."""
    return Slices(data, options).load()


def _end(match: re.Match[bytes] | None, position: int) -> int:
    return position if match is None else match.end()
