"""JSON of requests: how many values it holds is counted before any is made.

A byte of JSON can become thirty of memory: 36 MB of `[[],[],…]` are a gigabyte of lists. No request
that a model can answer needs more than `MAX_VALUES`, with keys, or `MAX_CONTAINERS`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic_core import from_json

MAX_VALUES = 2**21
"""2,048 prompts of a thousand token ids each; about 130 MB once they are made."""

MAX_CONTAINERS = 2**18
"""Lists and objects, which cost most; about 60 MB."""

_CHUNK_BYTES = 2**20
_CONTAINERS = b"[{"
_MARKS = b"[{,:"  # one before each value but the first, and one behind each key
_STRING_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING = re.compile(rb'"' + _STRING_REST + rb'"', re.DOTALL)
_INSIDE_STRING = re.compile(_STRING_REST, re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"' + _STRING_REST + rb'")*+', re.DOTALL)


class TooManyValues(ValueError):
    """JSON that would take far more memory than its bytes; the words follow "it"."""


def load_json(
    data: bytes,
    *,
    allow_inf_nan: bool = True,
    cache_strings: bool | Literal["all", "keys", "none"] = True,
) -> Any:
    """Return what JSON says; raises ValueError for what is none, `TooManyValues` for too much."""
    check_values(data)
    return from_json(data, allow_inf_nan=allow_inf_nan, cache_strings=cache_strings)


def check_values(data: bytes) -> None:
    """Raise `TooManyValues` for JSON that has more values than any request; nothing is parsed."""
    if len(data) <= MAX_CONTAINERS or _has_few_marks(data):
        return
    num_marks = num_containers = 0
    position, is_in_string = 0, False
    while position < len(data):
        stop = min(position + _CHUNK_BYTES, len(data))
        if is_in_string:
            position = _end_of(_INSIDE_STRING.match(data, position, stop), position)
            if data[position : position + 1] == b"\\":  # its other half lies behind the chunk
                position += 2
                continue
        else:
            end = _end_of(_WHOLE_STRINGS.match(data, position, stop), position)
            plain = _STRING.sub(b"", data[position:end])
            num_containers += sum(plain.count(mark) for mark in _CONTAINERS)
            num_marks += sum(plain.count(mark) for mark in _MARKS)
            _check(num_marks, num_containers)
            position = end
        if data[position : position + 1] == b'"':
            is_in_string = not is_in_string
            position += 1


def _has_few_marks(data: bytes) -> bool:
    """Say whether there are few enough even if none of them stands in a string."""
    num_marks = num_containers = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        stop = start + _CHUNK_BYTES
        num_containers += sum(data.count(mark, start, stop) for mark in _CONTAINERS)
        num_marks += sum(data.count(mark, start, stop) for mark in _MARKS)
        if num_marks >= MAX_VALUES or num_containers > MAX_CONTAINERS:
            return False
    return True


def _check(num_marks: int, num_containers: int) -> None:
    if num_containers > MAX_CONTAINERS:
        raise TooManyValues(f"has more than {MAX_CONTAINERS:,} lists and objects")
    if num_marks >= MAX_VALUES:
        raise TooManyValues(f"has more than {MAX_VALUES:,} values and keys")


def _end_of(found: re.Match[bytes] | None, position: int) -> int:
    return position if found is None else found.end()
