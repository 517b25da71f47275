"""Regular expressions as text: sets of characters, and composition of parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

CharSet = tuple[tuple[int, int], ...]
"""Characters as ranges of code points: sorted, not adjacent, without surrogates."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
ALL_CHARS: CharSet = ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST))
_LAST_SHORT = 0xFFFF
_NEWLINE = ord("\n")
_META = frozenset(r"\^$.|?*+()[]{}/-&~#")


def chars(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """Return ranges as a set of characters."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    cut = [(max(low, first), min(high, last)) for low, high in merged for first, last in ALL_CHARS]
    return tuple((low, high) for low, high in cut if low <= high)


def without(excluded: CharSet) -> CharSet:
    """Return all characters except these."""
    edges = [(-1, -1), *excluded, (_LAST + 1, _LAST + 1)]
    return chars(
        (one[1] + 1, other[0] - 1) for one, other in pairwise(edges) if one[1] + 1 < other[0]
    )


NOT_NEWLINE = without(((_NEWLINE, _NEWLINE),))


class Text(NamedTuple):
    """An expression; `level` is 0 for alternatives, 1 for a sequence, 2 for what can repeat."""

    text: str
    level: int

    def at(self, level: int) -> str:
        """Return the text as part of an expression of a level."""
        return self.text if self.level >= level else f"(?:{self.text})"


EMPTY = Text("", 1)


def joined(first: Text, second: Text) -> Text:
    """Return an expression of one part followed by another."""
    if not (first.text and second.text):
        return first if first.text else second
    return Text(first.at(1) + second.at(1), 1)


def either(first: Text, second: Text) -> Text:
    """Return an expression of one part or another."""
    if first == second:
        return first
    if not (first.text and second.text):
        return repeated(first if first.text else second, 0, 1)
    return Text(f"{first.text}|{second.text}", 0)


def repeated(part: Text, least: int, most: int | None) -> Text:
    """Return an expression of `least` to `most` times a part; `most` is None without a limit."""
    if not part.text:
        return part
    signs: Mapping[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    bounds = f"{least}" if least == most else f"{least},{'' if most is None else most}"
    return Text(part.at(2) + signs.get((least, most), f"{{{bounds}}}"), 1)


def shown(charset: CharSet) -> str:
    """Return a set of characters as an expression, by its complement if that is shorter."""
    if charset == NOT_NEWLINE:
        return "."
    if charset == ALL_CHARS:
        return "(?s:.)"
    if len(charset) == 1 and charset[0][0] == charset[0][1]:
        return _char(charset[0][0])
    ways = ["".join(map(_range, charset)), "^" + "".join(map(_range, without(charset)))]
    return f"[{min(ways, key=len)}]"


def _range(bounds: tuple[int, int]) -> str:
    low, high = bounds
    if low == high:
        return _char(low)
    return _char(low) + ("" if high == low + 1 else "-") + _char(high)


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isprintable():
        return f"\\{char}" if char in _META else char
    return f"\\u{code:04X}" if code <= _LAST_SHORT else f"\\U{code:08X}"
