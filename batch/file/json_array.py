"""One JSON array of requests as lines, one per element, with constant memory.

It looks only at strings and brackets: whether an element is a request, or JSON at all, shows
when its line is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .lines import FormatError, check_line_length

_BLANK = re.compile(rb"[ \t\r\n]*+")
_STRING_REST = rb'[^"\\\n]*+(?:\\.[^"\\\n]*+)*+'
_STRING = rb'"' + _STRING_REST + rb'"'
# Maximum nesting of brackets that one match skips: deeper ones take a match each. A chat request
# has four levels; more than about eight make the match slower.
_MATCHED_DEPTH = 6


def _balanced(depth: int) -> bytes:
    """Return a pattern of the content between two brackets, or before a single bracket."""
    plain = rb'[^"{}\[\]]++|' + _STRING
    if depth == 0:
        return rb"(?:" + plain + rb")*+"
    return rb"(?:" + plain + rb"|[{\[]" + _balanced(depth - 1) + rb"[}\]])*+"


_INSIDE_STRING = re.compile(_STRING_REST, re.DOTALL)
_INSIDE_BRACKETS = re.compile(_balanced(_MATCHED_DEPTH), re.DOTALL)
_NEXT_ELEMENT = re.compile(
    rb"[ \t\r\n]*+,[ \t\r\n]*+([{\[]" + _balanced(_MATCHED_DEPTH) + rb"[}\]])", re.DOTALL
)
_OUTSIDE_BRACKETS = re.compile(rb'(?:[^"{}\[\],]++|' + _STRING + rb")*+", re.DOTALL)


def elements_as_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the elements of an array, each followed by `\n`, in chunks of about the input's size.

    A chunk is empty if its input was blank. Everything before the first `[` is dropped. Raises
    FormatError with the number of the element.
    """
    reader = _Reader()
    before = b""
    is_begun = False
    for piece in pieces:
        data = piece
        if not is_begun:
            before += piece
            is_begun = b"[" in before
            data = before.partition(b"[")[2]
        yield reader.feed(data)
    reader.end()


class _Reader:
    """Reads an array after its `[`, and returns its elements as lines."""

    def __init__(self) -> None:
        self._number = 1
        self._num_bytes = 0  # of the element so far
        self._depth = 0
        self._is_inside = False  # inside an element
        self._is_in_string = False
        self._is_after_comma = False
        self._is_after_element = False
        self._is_over = False
        self._held = b""  # an incomplete escape

    def feed(self, piece: bytes) -> bytes:
        """Return the part of the elements' lines that the next bytes complete."""
        data, self._held = self._held + piece, b""
        lines: list[bytes] = []
        position = 0
        while position < len(data):
            if self._is_after_element:
                position = self._whole_elements(data, position, lines)
            if not self._is_inside:
                position = self._between(data, position)
                continue
            start, number = position, self._number
            position = self._inside(data, position)
            self._num_bytes += position - start
            check_line_length(number, self._num_bytes, "element")
            # No string can contain any of them.
            lines.append(data[start:position].replace(b"\n", b" "))
            if self._number > number:
                lines.append(b"\n")
            elif self._held:
                break
        return b"".join(lines)

    def end(self) -> None:
        """Raise FormatError unless the array has ended."""
        if self._is_inside:
            raise self._error(
                "does not end: the file is truncated, or a quote or bracket is missing in it"
            )
        if not self._is_over:
            raise self._error("is the last one, but the array's `]` is missing", before=True)

    def _whole_elements(self, data: bytes, position: int, lines: list[bytes]) -> int:
        """Read as many complete elements as the data contains, which is nearly all of them."""
        while found := _NEXT_ELEMENT.match(data, position):
            lines.append(found[1].replace(b"\n", b" "))
            lines.append(b"\n")
            position = found.end()
            self._number += 1
        return position

    def _between(self, data: bytes, position: int) -> int:
        """Skip the separator between two elements, or the end after the last."""
        match = _BLANK.match(data, position)
        position = match.end() if match else position
        if position == len(data):
            return position
        mark = data[position : position + 1]
        if self._is_over:
            raise self._error(
                "is the array's last, but more text follows its `]`: write a single array, or one "
                "object per line",
                before=True,
            )
        if mark == b"]":
            if self._is_after_comma:
                raise self._error("is the last one, but a comma follows it: remove it", before=True)
            self._is_over, self._is_after_element = True, False
        elif self._is_after_element:
            if mark != b",":
                raise self._error("has no comma after it", before=True)
            self._is_after_element, self._is_after_comma = False, True
        elif mark == b",":
            raise self._error("is empty: remove the extra comma")
        else:
            self._is_inside, self._is_after_comma = True, False
            return position
        return position + 1

    def _inside(self, data: bytes, position: int) -> int:
        """Return the end of the bytes that are known to belong to the element."""
        if self._is_in_string:
            return self._inside_string(data, position)
        pattern = _INSIDE_BRACKETS if self._depth else _OUTSIDE_BRACKETS
        match = pattern.match(data, position)
        position = match.end() if match else position
        mark = data[position : position + 1]
        if mark == b'"':
            self._is_in_string = True
            return self._inside_string(data, position + 1)
        if mark in {b"{", b"["}:
            self._depth += 1
        elif mark and self._depth:
            self._depth -= 1
            if not self._depth:
                self._finish()
        elif mark == b"}":
            raise self._error("has an unmatched `}`")
        elif mark:
            self._finish()
            return position
        return position + len(mark)

    def _inside_string(self, data: bytes, position: int) -> int:
        match = _INSIDE_STRING.match(data, position)
        position = match.end() if match else position
        mark = data[position : position + 1]
        if mark == b"\n":
            raise self._error("has a line break in a string: write it as \\n, or end the string")
        if mark == b"\\":
            self._held = mark
        elif mark:
            self._is_in_string = False
            position += 1
        return position

    def _finish(self) -> None:
        self._is_inside, self._is_after_element = False, True
        self._number += 1
        self._num_bytes = 0

    def _error(self, words: str, *, before: bool = False) -> FormatError:
        number = self._number - before
        if number == 0:
            return FormatError("The array is empty but does not end: its `]` is missing.")
        return FormatError(f"Element {number:,} of the array {words}.", number=number)
