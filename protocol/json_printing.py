"""JSON of large values, printed in parts, so that other threads run between the parts.

`to_json` holds the GIL until everything is printed: half a second for 50 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic_core import to_json

_PART_VALUES = 5_000  # a few milliseconds
_CHARS = 64  # of a text, which take as long as a value
_CONTAINERS = (dict, list)
_COUNTED = (dict, list, str)


def print_json(value: object, **options: Any) -> bytes:
    """Return a value as JSON; `options` are those of pydantic's `to_json`."""
    return b"".join(_parts(value, options))


def json_text(value: object) -> str:
    """Return a value as `json.dumps` prints it, without escapes of other letters than ASCII."""
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    parts = list[str]()
    while part := "".join(islice(pieces, _PART_VALUES)):
        parts.append(part)
    return "".join(parts)


def has_more_values(value: object, most: int) -> bool:
    """Say whether a value contains more than `most` values, without counting further."""
    return _count(value, most) > most


def discard(value: object, depth: int = 5) -> None:
    """Empty a value from the inside, so that freeing it never holds the GIL for long."""
    if not isinstance(value, _CONTAINERS):
        return
    if depth:
        for inside in value.values() if isinstance(value, dict) else value:
            discard(inside, depth - 1)
    value.clear()


def _parts(value: object, options: dict[str, Any]) -> Iterator[bytes]:
    """Yield JSON in parts of up to `_PART_VALUES` values each."""
    if isinstance(value, dict) and value and has_more_values(value, _PART_VALUES):
        for number, (key, inside) in enumerate(value.items()):
            # A key is printed inside an object, which converts any key to a string.
            head = to_json({key: None}, **options).removesuffix(b"null}")
            yield b"," + head[1:] if number else head
            yield from _parts(inside, options)
        yield b"}"
    elif isinstance(value, list) and has_more_values(value, _PART_VALUES):
        for number, group in enumerate(_groups(value)):
            yield b"," if number else b"["
            if len(group) == 1:
                yield from _parts(group[0], options)
            else:
                yield to_json(group, **options)[1:-1]
        yield b"]"
    elif isinstance(value, str) and has_more_values(value, _PART_VALUES):
        yield b'"'
        for start in range(0, len(value), _CHARS * _PART_VALUES):
            yield to_json(value[start : start + _CHARS * _PART_VALUES], **options)[1:-1]
        yield b'"'
    else:
        yield to_json(value, **options)


def _groups(values: list[Any]) -> Iterator[list[Any]]:
    """Yield consecutive items; a group has more than `_PART_VALUES` values if it is one item."""
    start = num_values = 0
    for place, value in enumerate(values):
        num_more = _count(value, _PART_VALUES)
        if place > start and num_values + num_more > _PART_VALUES:
            yield values[start:place]
            start, num_values = place, 0
        num_values += num_more
    yield values[start:]


def _count(value: object, most: int) -> int:
    """Return the number of values in a value, including itself; stops above `most`.

    Long texts count as several. Containers and texts in a list whose first item is neither count
    as one value each.
    """
    num_values = 1
    holders = [value] if isinstance(value, _COUNTED) else []
    for holder in holders:  # grows by the containers and texts in it
        if isinstance(holder, str):
            num_values += len(holder) // _CHARS
            continue
        num_values += len(holder)
        if num_values > most:
            break
        if isinstance(holder, dict):
            holders += [one for one in holder.values() if isinstance(one, _COUNTED)]
        elif holder and isinstance(holder[0], _COUNTED):
            holders += [one for one in holder if isinstance(one, _COUNTED)]
    return num_values
