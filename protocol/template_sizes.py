"""Template sizes: the length of a filter's, method's or operator's result, before it is created.

Each function takes the arguments of the filter or method in its name. Arguments of another type
give 0: the filter itself refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

_ITEM_CHARS = 32
_WORD_CHARS = 40
_MAX_WEIGHT = 2**26
_MAX_DIGITS = 400
_MAX_INDENT = 64
# A `%` conversion: its width and its precision.
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")
_NUMBER = re.compile(r"\d+")

Size = Callable[..., float]


def weight_of(value: Any, limit: float) -> float:
    """Return the length of a value with all its contents, or more than `limit`.

    A value that is in a list twice counts twice, because it is printed and compared twice.
    """
    total, left = 0.0, [value]
    while left and total <= limit:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, (list, tuple, dict)):
            if isinstance(item, dict):
                left += item.keys()
                item = item.values()
            if len(item) * _ITEM_CHARS > limit:
                return inf
            left += item
        total += _ITEM_CHARS
    return total


def formatted(text: str, values: Any, limit: float) -> float:
    """Return the maximum number of characters of `text % values`."""
    conversions = _CONVERSION.findall(text)
    widths = [width for pair in conversions for width in pair if width]
    given = [int(width) for width in widths if width != "*"]
    stars = [abs(value) for value in _as_tuple(values) if isinstance(value, int)]
    size = len(text) + sum(given) + widths.count("*") * max(stars, default=0)
    # A name may be in a text more than once.
    times = len(conversions) if isinstance(values, dict) else 1
    return size + times * weight_of(values, limit)


def field_size(spec: str) -> float:
    """Return the greatest number in the format of a field."""
    return max((int(digits) for digits in _NUMBER.findall(spec[:_MAX_DIGITS])), default=0)


def _as_tuple(values: Any) -> Sequence[Any]:
    if isinstance(values, dict):
        return tuple(values.values())
    return values if isinstance(values, tuple) else (values,)


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _length(value: Any) -> float:
    return len(value) if isinstance(value, str) else weight_of(value, _MAX_WEIGHT)


def _center(_: Any, width: Any = 80, *__: Any, **___: Any) -> float:
    return _number(width)


def _replace(value: Any, old: Any, new: Any, count: Any = None, *_: Any) -> float:
    if not isinstance(value, str):
        return 0
    times = value.count(old) if isinstance(old, str) and old else len(value) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(value) + times * _length(new)


def _indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> float:
    size = len(width) if isinstance(width, str) else _number(width)
    text = str(value)
    return (text.count("\n") + 2) * (size + _ITEM_CHARS) + len(text)


def _words(value: Any, *_: Any) -> float:
    """Return the size of a text that is split into words."""
    return len(value) * _WORD_CHARS if isinstance(value, str) else 0


def _escaped(value: Any) -> float:
    text = str(value)
    return len(text) + 4 * sum(map(text.count, "&<>\"'"))


def _encoded_url(value: Any) -> float:
    return 12 * len(value) if isinstance(value, str) else 0


def _wordwrap(value: Any, width: Any = 79, *args: Any, wrapstring: Any = None, **_: Any) -> float:
    text = str(value)
    lines = min(len(text), 2 * len(text) // max(1, _number(width)) + text.count("\n") + 1)
    longest = max((len(each) for each in (*args, wrapstring) if isinstance(each, str)), default=1)
    return _words(text) + lines * longest


def _truncate(_: Any, length: Any = 255, *__: Any, **___: Any) -> float:
    return _number(length)


def _rows(value: Any, number: Any, fill_with: Any = None) -> float:
    if isinstance(fill_with, (list, tuple, dict)):
        return inf
    return _number(number) * 2 * _ITEM_CHARS + _items(value)


def _digits(_: Any, precision: Any = 0, *__: Any) -> float:
    return 0 if _number(precision) <= _MAX_DIGITS else inf


def _tojson(_: Any, *args: Any, **names: Any) -> float:
    for value in (*args, *names.values()):
        parts = value if isinstance(value, (list, tuple)) else (value,)
        sizes = (len(part) if isinstance(part, str) else _number(part) for part in parts)
        if max(sizes, default=0) > _MAX_INDENT:
            return inf
    return 0


def _items(value: Any, *_: Any, **__: Any) -> float:
    """Return the size of a text as a list of its characters."""
    return len(value) * _ITEM_CHARS if isinstance(value, str) else 0


def _sum(_: Any, *args: Any, **names: Any) -> float:
    """Return no bound for lists: their sum copies each of them again and again."""
    return inf if any(isinstance(each, (list, tuple)) for each in (*args, *names.values())) else 0


def _expanded(value: Any, tabsize: Any = 8) -> float:
    return len(value) + value.count("\t") * _number(tabsize) if isinstance(value, str) else 0


def _split(value: Any, sep: Any = None, *_: Any, **__: Any) -> float:
    if not isinstance(value, str):
        return 0
    parts = value.count(sep) if isinstance(sep, str) and sep else len(value) // 2
    return len(value) + parts * _ITEM_CHARS


def _joined(separator: Any, values: Any) -> float:
    if not isinstance(values, (str, list)):
        return 0
    return len(separator) * len(values) + sum(len(v) for v in values if isinstance(v, str))


FILTERS: Mapping[str, Size] = MappingProxyType(
    {
        "batch": _rows,
        "center": _center,
        "e": _escaped,
        "escape": _escaped,
        "forceescape": _escaped,
        "groupby": _items,
        "indent": _indent,
        "map": _items,
        "reject": _items,
        "rejectattr": _items,
        "replace": _replace,
        "round": _digits,
        "select": _items,
        "selectattr": _items,
        "slice": _rows,
        "sort": _items,
        "sum": _sum,
        "title": _words,
        "tojson": _tojson,
        "truncate": _truncate,
        "unique": _items,
        "urlencode": _encoded_url,
        "wordcount": _words,
        "wordwrap": _wordwrap,
    }
)
"""Sizes by the names of filters."""

METHODS: Mapping[str, Size] = MappingProxyType(
    {
        "center": _center,
        "expandtabs": _expanded,
        "join": _joined,
        "ljust": _center,
        "replace": _replace,
        "rjust": _center,
        "rsplit": _split,
        "split": _split,
        "splitlines": _items,
        "zfill": _center,
    }
)
"""Sizes by the names of methods, whose first argument is the value of the method."""
