"""JSON bodies, parsed within limits; values are counted before any is allocated.

A byte of JSON can take thirty bytes of memory: 36 MB of `[[],[],…]` are a gigabyte of lists. No
valid request needs more than `MAX_VALUES`, including keys, or `MAX_CONTAINERS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from .json_slices import load_in_slices

MAX_VALUES = 2**21
"""Enough for 2,048 prompts of a thousand token IDs each; about 130 MB once parsed."""

MAX_CONTAINERS = 2**16
"""Lists and objects cost most: about 15 MB. Every garbage collection visits each of them."""

_LARGE_BYTES = 2**20  # above this, JSON is parsed in slices
_CHUNK_BYTES = 2**18  # a few milliseconds, during which no other thread runs
_CONTAINER_BYTES, _VALUE_BYTES = 72, 40
_STRING_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING = re.compile(rb'"' + _STRING_REST + rb'"', re.DOTALL)
_INSIDE_STRING = re.compile(_STRING_REST, re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"' + _STRING_REST + rb'")*+', re.DOTALL)


class TooManyValues(ValueError):
    """JSON that would need far more memory than its bytes; the message follows "it"."""


def load_json(
    data: bytes,
    *,
    allow_inf_nan: bool = True,
    cache_strings: bool | Literal["all", "keys", "none"] = True,
    in_slices: bool = False,
) -> Any:
    """Return parsed JSON; raises ValueError if it is invalid, `TooManyValues` above the limits.

    With `in_slices` another thread's event loop keeps running while large JSON is parsed.
    """
    check_values(data)
    if in_slices and len(data) > _LARGE_BYTES:
        return load_in_slices(data, allow_inf_nan=allow_inf_nan, cache_strings=cache_strings)
    return from_json(data, allow_inf_nan=allow_inf_nan, cache_strings=cache_strings)


def check_values(data: bytes) -> None:
    """Raise `TooManyValues` for JSON with more values than any request has, without parsing it."""
    if len(data) <= MAX_CONTAINERS:
        return
    if all(_is_allowed(marks) for marks in _sums(_marks_anywhere(data))):
        return
    for marks in _sums(_marks_outside_strings(data)):
        if marks.containers > MAX_CONTAINERS:
            raise TooManyValues(f"has more than {MAX_CONTAINERS:,} lists and objects")
        if marks.all >= MAX_VALUES:
            raise TooManyValues(f"has more than {MAX_VALUES:,} values and keys")


def unfolded_bytes(data: bytes) -> int:
    """Return an estimate of the memory of parsed JSON without its strings, in bytes."""
    marks = _total(_marks_anywhere(data))
    if marks.num_bytes > len(data):  # otherwise marks within strings make no difference
        marks = _total(_marks_outside_strings(data))
    return marks.num_bytes


class _Marks(NamedTuple):
    """Numbers of brackets that open a list or an object, and of all marks of values and keys."""

    containers: int
    all: int

    @classmethod
    def from_bytes(cls, data: bytes, start: int = 0, stop: int | None = None) -> _Marks:
        """Count the marks in a range of bytes, within strings too."""
        containers = sum(data.count(mark, start, stop) for mark in b"[{")
        return cls(containers, containers + sum(data.count(mark, start, stop) for mark in b",:"))

    @property
    def num_bytes(self) -> int:
        """Return an estimate of the memory of the parsed values, in bytes."""
        return self.containers * _CONTAINER_BYTES + self.all * _VALUE_BYTES


def _marks_anywhere(data: bytes) -> Iterator[_Marks]:
    """Yield the marks of each chunk, within strings too."""
    for start in range(0, len(data), _CHUNK_BYTES):
        yield _Marks.from_bytes(data, start, start + _CHUNK_BYTES)


def _marks_outside_strings(data: bytes) -> Iterator[_Marks]:
    """Yield the marks of each chunk without those in strings."""
    position, is_in_string = 0, False
    while position < len(data):
        stop = min(position + _CHUNK_BYTES, len(data))
        if is_in_string:
            position = _end_of(_INSIDE_STRING.match(data, position, stop), position)
            if data[position : position + 1] == b"\\":  # the escaped character is in the next chunk
                position += 2
                continue
        else:
            end = _end_of(_WHOLE_STRINGS.match(data, position, stop), position)
            yield _Marks.from_bytes(_STRING.sub(b"", data[position:end]))
            position = end
        if data[position : position + 1] == b'"':
            is_in_string = not is_in_string
            position += 1


def _sums(chunks: Iterable[_Marks]) -> Iterator[_Marks]:
    """Yield the cumulative number of marks after each chunk."""
    return accumulate(chunks, lambda one, other: _Marks(one[0] + other[0], one[1] + other[1]))


def _total(chunks: Iterable[_Marks]) -> _Marks:
    """Return the number of marks, or the first sum above the limits."""
    marks = _Marks(0, 0)
    for marks in _sums(chunks):
        if not _is_allowed(marks):
            break
    return marks


def _is_allowed(marks: _Marks) -> bool:
    return marks.containers <= MAX_CONTAINERS and marks.all < MAX_VALUES


def _end_of(match: re.Match[bytes] | None, position: int) -> int:
    return position if match is None else match.end()
