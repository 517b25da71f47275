"""KV cache forecast: whether the cache can hold one more sequence until the running ones end.

A sequence that starts too early is preempted when pages run out, and computed again; one that
starts too late leaves memory unused. So the use of the cache is simulated: each sequence grows by
one token per step, and releases its pages at its end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..state.pages import PagePool
from .sequence import Sequence, SequenceRequest
from .table import SequenceTable

_PRIOR_SHARE, _PRIOR_ENDS = 0.25, 4
"""The prior share of `max_tokens` that answers use, and its weight in observed answers."""


class KVForecast:
    """Forecasts the pages that sequences of a table need.

    An answer that only `max_tokens` ends has that length; for others the mean share of it is
    learned. `pages_a_page` page groups of the pool grow with every token.
    """

    def __init__(self, table: SequenceTable, pool: PagePool, pages_a_page: int = 1) -> None:
        self._table = table
        self._pool = pool
        self._pages_a_page = pages_a_page
        self._expected = np.zeros(len(table.sequences), np.int64)  # tokens of answers, by slot
        self._shared = np.zeros(len(table.sequences), np.int64)  # cached tokens, by slot
        self._shares, self._num_ends = _PRIOR_SHARE * _PRIOR_ENDS, _PRIOR_ENDS

    def fits(self, sequence: Sequence, num_cached: int, num_needed: int) -> bool:
        """Return whether all sequences can end if one more enters with `num_cached` cached tokens.

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
        """Record that a sequence has entered a slot with `num_cached` cached tokens."""
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
    """Return whether only `max_tokens` can end an answer."""
    watchers = (request.stop_text, request.repetition, request.constraint)
    return not request.stop_token_ids and all(watcher is None for watcher in watchers)


def _peak(left: NDArray[np.int64], own: NDArray[np.int64]) -> int:
    """Return the maximum number of tokens that sequences will hold beyond their current ones.

    The maximum is just before the end of one of them; an ended sequence holds none.
    """
    order = np.argsort(left)
    left, own = left[order], own[order]
    num_alive = np.arange(len(left), 0, -1)
    freed = np.append(0, np.cumsum(own)[:-1])
    return int((num_alive * left - freed).max())
