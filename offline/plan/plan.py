"""Plan: the order in which lines of a file start, and their remaining work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidemill.batch.file.expected_tokens import UNTOLD_TOKENS
from tidemill.engine.speculation.cost_model import Work

from .line_index import UNKNOWN, LineIndex
from .order import PrefixTree

_MIN_FINISHED: Final = 4
_NUM_PROBES: Final = 8
_MIN_PROBED: Final = 200
_MAX_PROBED: Final = 64
"""Up to `_MAX_PROBED` groups of at least `_MIN_PROBED` lines have `_NUM_PROBES` lines run first."""

_GROUP_LEVEL: Final = 1
"""Lines whose prompts share the first 256 bytes are one group."""


class OutputLengths:
    """Expected output tokens by place: `max_tokens` at first, then the mean of a line's group.

    A group consists of lines with the same `max_tokens` and prompt prefix. A group with too little
    data is expected to reach the same share of `max_tokens` as all others.
    """

    def __init__(self, records: NDArray[Any]) -> None:
        self._most = records["max_tokens"].astype(np.float64)
        self._most[records["max_tokens"] == UNKNOWN] = np.inf
        kinds = records["prefixes"][:, _GROUP_LEVEL].astype(np.int64) << 32
        kinds ^= records["max_tokens"]
        _, self._group_of = np.unique(kinds, return_inverse=True)
        num_groups = int(self._group_of.max(initial=-1)) + 1
        self._finished = np.zeros(num_groups, np.int64)
        self._tokens = np.zeros(num_groups)
        self._known_most = self._known_tokens = 0.0  # of finished lines with a limit
        self._num_unlimited, self._unlimited_tokens = 0, 0.0

    def add(self, places: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> None:
        """Learn from finished rows."""
        groups, most = self._group_of[places], self._most[places]
        np.add.at(self._finished, groups, 1)
        np.add.at(self._tokens, groups, output_tokens)
        is_limited = most < np.inf
        num_known, num_tokens = int(is_limited.sum()), float(output_tokens[is_limited].sum())
        self._num_unlimited += len(places) - num_known
        self._unlimited_tokens += float(output_tokens.sum()) - num_tokens
        self._known_most += float(most[is_limited].sum())
        self._known_tokens += num_tokens

    def probes(self, is_left: NDArray[np.bool_]) -> list[int]:
        """Return a few lines of each large group, to learn from before the group runs."""
        places = np.flatnonzero(is_left)
        places = places[np.argsort(self._group_of[places], kind="stable")]
        groups, starts, counts = np.unique(
            self._group_of[places], return_index=True, return_counts=True
        )
        if len(groups) < 2:
            return []
        is_large = counts >= _MIN_PROBED
        starts, counts = starts[is_large][:_MAX_PROBED], counts[is_large][:_MAX_PROBED]
        steps = np.arange(_NUM_PROBES)
        chosen = starts[:, None] + steps * counts[:, None] // _NUM_PROBES
        probes: list[int] = places[chosen.ravel()].tolist()
        return probes

    def expected(self) -> NDArray[np.float64]:
        """Return the expected output tokens of each line."""
        share = self._known_tokens / self._known_most if self._known_most else 1.0
        unlimited = float(UNTOLD_TOKENS)
        if self._num_unlimited:
            unlimited = self._unlimited_tokens / self._num_unlimited
        expected = np.where(np.isinf(self._most), unlimited, np.minimum(1.0, share) * self._most)
        is_known = self._finished >= _MIN_FINISHED
        means = self._tokens / np.maximum(1, self._finished)
        known = is_known[self._group_of]
        expected[known] = np.minimum(means[self._group_of][known], self._most[known])
        return expected

    def after(self, places: NDArray[np.int64], num_tokens: float) -> NDArray[np.float64]:
        """Return the expected output tokens of lines that have reached `num_tokens` and not ended.

        The expectation is twice that number, up to their limit.
        """
        return np.minimum(2 * num_tokens, self._most[places])


_MAX_REORDERED: Final = 2**14
"""Reordering this many lines takes about 20 ms."""

_MIN_REORDERED: Final = 64
_PAGE_TOKENS: Final = 16
_SHARED_BYTES: Final = 64
_CHANGE: Final = 0.25


class Plan:
    """Plan of the lines of `index` without a row; reordered when expected lengths are off.

    With `is_ordered` off, lines start in file order.
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
        self.is_repeat = _repeats(records["body_hash"], is_left & is_ordered)
        self.num_lines = self.num_waiting = len(self._tree.places)
        self._started = np.empty(self.num_lines, np.int64)
        self._prompt_bytes = records["prompt_bytes"]
        is_computed = ~self.is_repeat[self._tree.places]
        lengths = self._prompt_bytes[self._tree.places].astype(np.int64)
        shared = self._tree.shared
        self.num_own_bytes = int((lengths - shared)[is_computed].sum())
        # Shared prefixes are found in whole pages: on average, half of the last page is recomputed.
        num_sharing = int((is_computed & (shared >= _SHARED_BYTES)).sum())
        self.num_page_tokens = num_sharing * _PAGE_TOKENS // 2
        self.total_prompt_bytes = int(lengths.sum())
        self.finished_prompt_bytes = 0
        self._expected = self.lengths.expected()
        self._order = self._tree.ordered(self._expected) if is_ordered else places[is_left]

    def __iter__(self) -> Iterator[int]:
        """Yield the places of the lines to run, each when it is to start."""
        for place in self.lengths.probes(self._is_waiting) if self._is_ordered else ():
            yield self._start(place)
        order = self._order[self._is_waiting[self._order]]
        while len(order):
            # A long file is reordered only when few lines are left.
            num_next = len(order) - _MAX_REORDERED
            if num_next < _MAX_REORDERED:
                num_next = max(_MIN_REORDERED, len(order) // 8)
            for place in order[:num_next].tolist():
                yield self._start(place)
            order = self._order = self._renewed(order[num_next:])

    def finish(self, places: Sequence[int], output_tokens: Sequence[int]) -> int:
        """Learn from finished rows; return the output tokens of those that are not repeats.

        A row without output tokens has failed, or generates none.
        """
        rows, tokens = np.array(places, np.int64), np.array(output_tokens, np.int64)
        self._is_unfinished[rows] = False
        self.finished_prompt_bytes += int(self._prompt_bytes[rows].sum())
        tokens = np.where(self.is_repeat[rows], 0, tokens)
        is_known = tokens > 0
        self.lengths.add(rows[is_known], tokens[is_known])
        return int(tokens.sum())

    def unfinished(self) -> list[int]:
        """Return the places of the lines without a row, in file order."""
        places: list[int] = np.flatnonzero(self._is_unfinished).tolist()
        return places

    def own_tokens(self, tokens_a_byte: float) -> float:
        """Return the prompt tokens to compute if no prefix is evicted too early."""
        return tokens_a_byte * self.num_own_bytes + self.num_page_tokens

    def work_left(self, tokens_a_byte: float, begun: float = 0.0, num_running: float = 0.0) -> Work:
        """Return the expected work of all lines without a row, except its steps.

        The `num_running` running lines have `begun` tokens. Prompts are counted as if none had
        started.
        """
        is_counted = self._is_unfinished & ~self.is_repeat
        outputs = self._outputs(begun, num_running)[is_counted]
        prompts = tokens_a_byte * self._prompt_bytes[is_counted]
        total = float(outputs.sum())
        decoded = max(0.0, total - begun)
        return Work(
            prefilled=self.own_tokens(tokens_a_byte),
            decoded=decoded,
            attended=float(outputs @ (prompts + outputs / 2)) * decoded / max(1.0, total),
        )

    def expected_steps(
        self, max_num_seqs: int, begun: float = 0.0, num_running: float = 0.0
    ) -> float:
        """Return the number of steps to decode all lines of the plan."""
        left = self._order[self._is_waiting[self._order]]
        places = np.concatenate([self._started[: self.num_lines - len(left)], left])
        outputs = self._outputs(begun, num_running)[places[~self.is_repeat[places]]]
        # A line starts when an earlier one ends, with about half of the running ones decoded.
        before = np.append(0.0, np.cumsum(outputs))
        starts = np.zeros(len(outputs))
        num_later = len(starts[max_num_seqs:])
        starts[max_num_seqs:] = before[max_num_seqs:-1] + before[1 : num_later + 1]
        return float((starts / (2 * max_num_seqs) + outputs).max(initial=0.0))

    def _outputs(self, begun: float, num_running: float) -> NDArray[np.float64]:
        """Return the expected output tokens of each line.

        If the running lines have more tokens than expected, only short ones have ended so far,
        which are not representative of them.
        """
        expected = self.lengths.expected()
        places = self._started[: self.num_lines - self.num_waiting]
        places = places[self._is_unfinished[places] & ~self.is_repeat[places]][: int(num_running)]
        if len(places) and begun > expected[places].sum():
            expected[places] = self.lengths.after(places, begun / len(places))
        return expected

    def _start(self, place: int) -> int:
        self._started[self.num_lines - self.num_waiting] = place
        self._is_waiting[place] = False
        self.num_waiting -= 1
        return place

    def _renewed(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the order of the remaining lines, reordered if expected lengths were off."""
        if not self._is_ordered or len(order) > _MAX_REORDERED:
            return order
        expected = self.lengths.expected()
        if not _have_changed(self._expected[order], expected[order]):
            return order
        self._expected = expected
        return self._tree.only(self._is_waiting).ordered(expected)


def _have_changed(expected: NDArray[np.float64], now: NDArray[np.float64]) -> bool:
    """Return whether lengths differ so much from expectations that reordering is worthwhile."""
    return bool((np.abs(now - expected) > _CHANGE * (1 + expected)).any())


def _repeats(hashes: NDArray[np.int64], is_left: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which lines have the same result as an earlier line."""
    _, first = np.unique(hashes, return_index=True)
    is_repeat = np.ones(len(hashes), np.bool_)
    is_repeat[first] = False
    is_repeat &= (hashes != 0) & is_left
    return is_repeat
