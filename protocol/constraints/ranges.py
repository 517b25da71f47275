"""Numeric ranges: bounds of a JSON schema, tightened to ones that a grammar can enforce.

llguidance reads bounds as floats and counts in 64 bits: beyond 2**53 it allows numbers slightly
outside, and beyond 64 bits it fails. Every number within a tightened bound is in the range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

LARGEST = 2**63 - 2**10  # the largest float below 2**63
_EXACT = 2**53  # all integers up to this are floats
_ENDLESS = 10**18  # from here on a range needs both ends
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = (*_LOWER, *_UPPER)


class RangeError(ValueError):
    """A bound, given by its keyword, beyond the numbers that can be written."""

    def __init__(self, keyword: str, words: str) -> None:
        super().__init__(words)
        self.keyword = keyword


def held_range(schema: Mapping[str, Any]) -> dict[str, float]:
    """Return enforceable bounds, to replace a schema's own.

    Raises `RangeError` if the range contains no number.
    """
    found = {word: schema[word] for word in BOUNDS if word in schema}
    # Not-a-number values fail this comparison; other checks refuse them.
    large = [word for word in found if abs(schema[word]) >= _EXACT]
    kinds = schema.get("type")
    is_whole = kinds == "integer" or (isinstance(kinds, list) and "number" not in kinds)
    for word in large:
        del found[word]
        inclusive, bound = _held(word, schema[word], is_whole=is_whole)
        side = min if word in _UPPER else max
        found[inclusive] = side(bound, found.get(inclusive, bound))
    if large:
        low = max((found[word] for word in _LOWER if word in found), default=-LARGEST)
        high = min((found[word] for word in _UPPER if word in found), default=LARGEST)
        is_open = found.get("exclusiveMinimum") == low or found.get("exclusiveMaximum") == high
        if low > high or (low == high and is_open):
            raise RangeError(large[0], "leaves no valid number")
        if low >= _ENDLESS:
            found.setdefault("maximum", LARGEST)
        if high <= -_ENDLESS:
            found.setdefault("minimum", -LARGEST)
    return found


def _held(word: str, bound: float, *, is_whole: bool) -> tuple[str, float]:
    """Return an enforceable bound and its keyword."""
    is_exclusive = word.startswith("exclusive")
    sign = -1 if word in _LOWER else 1
    inclusive = "minimum" if sign < 0 else "maximum"
    end = sign * bound  # seen from inside, the range is below
    if end < -LARGEST or (is_exclusive and end <= -LARGEST):
        raise RangeError(word, f"must be between -{LARGEST:,} and {LARGEST:,}")
    if end > LARGEST:
        return inclusive, sign * LARGEST
    whole = math.floor(end)
    moved = _float_below(whole - 1 if is_exclusive and is_whole else whole)
    # Above 2**53 floats are integers; one below the bound no longer needs an exclusive bound.
    return (word if is_exclusive and moved == end else inclusive), sign * moved


def _float_below(whole: int) -> int:
    """Return the largest float that is at most an integer, also when printed in shortest form.

    llguidance parses the bounds of non-integers from that form.
    """
    near = float(whole)
    while max(int(near), int(Decimal(repr(near)))) > whole:
        near = math.nextafter(near, -math.inf)
    return int(near)
