"""KV cache forecast: whether the cache holds running sequences to their ends with one more.

A sequence that starts too early gives way when pages run out, and is computed again; one that
starts too late leaves memory empty. So the use of the cache is simulated: all grow by a token a
step, and give back what they hold as they end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..state.pages import PagePool
from .sequence import Sequence, SequenceRequest
from .table import SequenceTable

_PRIOR_SHARE, _PRIOR_ENDS = 0.25, 4
"""Of `max_tokens` that answers take which may end before, as if so many had been seen."""


class KVForecast:
    """Forecasts the pages that sequences of a table come to.

    Answers that nothing ends before `max_tokens` are as long as that; of others the mean share of
    it is learned. `pages_a_page` page groups of the pool grow with every token.
    """

    def __init__(self, table: SequenceTable, pool: PagePool, pages_a_page: int = 1) -> None:
        self._table = table
        self._pool = pool
        self._pages_a_page = pages_a_page
        self._expected = np.zeros(len(table.sequences), np.int64)  # tokens of answers, by slot
        self._shared = np.zeros(len(table.sequences), np.int64)  # cached tokens, by slot
        self._shares, self._num_ends = _PRIOR_SHARE * _PRIOR_ENDS, _PRIOR_ENDS

    def fits(self, sequence: Sequence, num_cached: int, num_needed: int) -> bool:
        """Say whether a sequence that enters with so many cached tokens lets all others end.

        `num_needed` pages must be free for it to start.
        """
        running = self._table.running
        if not len(running):
            return True
        num_free = (self._pool.num_free - num_needed) // self._pages_a_page
        generated = self._table.num_tokens[running] - self._table.num_prompt_tokens[running]
        left = np.append(
            self._expected[running] - generated,
            self._expected_of(sequence.request) - len(sequence.generated),
        )
        left = np.maximum(left, 1)
        size = self._table.page_size
        if int(left.sum()) <= num_free * size:
            return True
        own = np.append(
            self._table.num_tokens[running] - self._shared[running],
            sequence.num_tokens - num_cached,
        )
        return _peak(left, own) <= num_free * size

    def enter(self, slot: int, num_cached: int) -> None:
        """Take note that a sequence has entered a slot with so many cached tokens."""
        self._expected[slot] = self._expected_of(self._table.sequence(slot).request)
        self._shared[slot] = num_cached

    def note_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended."""
        request = sequence.request
        if request.max_tokens and not _is_certain(request):
            self._shares += len(sequence.generated) / request.max_tokens
            self._num_ends += 1

    def _expected_of(self, request: SequenceRequest) -> int:
        most = self._table.most_tokens(request) - len(request.prompt_ids)
        share = 1.0 if _is_certain(request) else self._shares / self._num_ends
        return max(1, round(share * most))


def _is_certain(request: SequenceRequest) -> bool:
    """Say whether nothing ends an answer before its `max_tokens`."""
    watchers = (request.stop_text, request.repetition, request.constraint)
    return not request.stop_token_ids and all(watcher is None for watcher in watchers)


def _peak(left: NDArray[np.int64], own: NDArray[np.int64]) -> int:
    """Return the most tokens that sequences hold beyond those that they hold now.

    Just before the one ends that has the least left, and so on; who has ended holds none.
    """
    order = np.argsort(left)
    left, own = left[order], own[order]
    num_alive = np.arange(len(left), 0, -1)
    freed = np.append(0, np.cumsum(own)[:-1])
    return int((num_alive * left - freed).max())
