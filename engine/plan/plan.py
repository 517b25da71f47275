"""Plan: the order that the lines of a file start in, and how much work is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .line_index import LineIndex
from .order import PrefixTree
from .output_lengths import OutputLengths

_MAX_REORDERED: Final = 2**14
"""The order of so many lines is made again in some 20 ms."""

_MIN_REORDERED: Final = 64
_CHANGE: Final = 0.25


class Plan:
    """Plan of the lines of `index` that have no row yet; made again where lengths turn out others.

    With `is_ordered` off, lines start in the order of the file.
    """

    def __init__(
        self, index: LineIndex, has_row: Callable[[int], bool], *, is_ordered: bool = True
    ) -> None:
        records = index.records
        self.lengths = OutputLengths(records)
        self._is_ordered = is_ordered
        places = np.arange(len(records))
        is_left = np.array([not has_row(place) for place in range(len(records))], np.bool_)
        self._tree = PrefixTree.from_index(index, places[is_left])
        self._is_waiting, self._is_unfinished = is_left.copy(), is_left.copy()
        self.is_repeat = _repeats(records["body_hash"], is_left)
        self._prompt_bytes = records["prompt_bytes"]
        own = self._prompt_bytes.astype(np.float64)
        own[self._tree.places] -= self._tree.shared
        own[self.is_repeat | ~is_left] = 0
        self.own_bytes = np.maximum(own, 0)
        self.num_prompt_bytes = int(self._prompt_bytes[is_left & ~self.is_repeat].sum())
        self.total_prompt_bytes = int(self._prompt_bytes[is_left].sum())
        self.finished_prompt_bytes = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the places of the lines to run, each once, when it is to start."""
        if not self._is_ordered:
            yield from np.flatnonzero(self._is_waiting).tolist()
            return
        for place in self.lengths.probes(self._is_waiting).tolist():
            self._is_waiting[place] = False
            yield place
        num_left = int(self._is_waiting.sum())
        order, expected = self._tree.places, None
        while num_left:
            now = self.lengths.expected()
            if expected is None or _have_changed(expected, now):
                expected = now
                order = self._tree.only(self._is_waiting).ordered(expected)
            # Of a long file the order is made again once few lines are left.
            num_next = num_left - _MAX_REORDERED
            if num_next < _MAX_REORDERED:
                num_next = min(num_left, max(_MIN_REORDERED, num_left // 8))
            for place in order[:num_next].tolist():
                self._is_waiting[place] = False
                yield place
            order = order[num_next:]
            num_left -= num_next

    def finish(self, place: int, output_tokens: int) -> None:
        """Learn from a finished row."""
        self._is_unfinished[place] = False
        self.finished_prompt_bytes += int(self._prompt_bytes[place])
        if not self.is_repeat[place]:
            self.lengths.add(place, output_tokens)

    def unfinished(self) -> list[int]:
        """Return the places of the lines without a row, in the order of the file."""
        places: list[int] = np.flatnonzero(self._is_unfinished).tolist()
        return places

    def output_tokens_left(self) -> float:
        """Return the expected tokens of all lines without a row, as if none of them had begun."""
        is_counted = self._is_unfinished & ~self.is_repeat
        return float(self.lengths.expected()[is_counted].sum())


def _have_changed(expected: NDArray[np.float64], now: NDArray[np.float64]) -> bool:
    """Say whether lengths turned out so different that another order is worth its while."""
    return bool((np.abs(now - expected) > _CHANGE * (1 + expected)).any())


def _repeats(hashes: NDArray[np.uint64], is_left: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which lines give the result of a line before them."""
    _, first = np.unique(hashes, return_index=True)
    is_repeat = np.ones(len(hashes), np.bool_)
    is_repeat[first] = False
    is_repeat &= (hashes != 0) & is_left
    return is_repeat
