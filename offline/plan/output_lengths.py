"""Output lengths: tokens that answers are expected to have, learned as rows finish."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidemill.protocol.output_limit import UNTOLD_TOKENS

from .line_index import UNKNOWN

_MIN_FINISHED: Final = 4
_NUM_PROBES: Final = 8
_MIN_PROBED: Final = 200
_MAX_PROBED: Final = 64
"""So many groups, of at least so many lines, have `_NUM_PROBES` of them run first."""

_GROUP_LEVEL: Final = 1
"""Lines whose prompts begin alike for 256 bytes are one group."""


class OutputLengths:
    """Expected output tokens by place: `max_tokens` at first, then the mean of a line's group.

    A group are the lines of one `max_tokens` whose prompts begin alike. Of a group that too little
    is known of, as large a share of `max_tokens` is expected as all others came to.
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
        self._known_most = self._known_tokens = 0.0  # of finished lines that name a most
        self._num_untold = self._untold_tokens = 0

    def add(self, place: int, output_tokens: int) -> None:
        """Learn from a finished row."""
        group, most = self._group_of.item(place), self._most.item(place)
        self._finished[group] += 1
        self._tokens[group] += output_tokens
        if most == np.inf:
            self._num_untold += 1
            self._untold_tokens += output_tokens
        else:
            self._known_most += most
            self._known_tokens += output_tokens

    def probes(self, is_left: NDArray[np.bool_]) -> list[int]:
        """Return a few lines of each large group, to learn from before its turn comes."""
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
        untold = float(UNTOLD_TOKENS)
        if self._num_untold:
            untold = self._untold_tokens / self._num_untold
        expected = np.where(np.isinf(self._most), untold, np.minimum(1.0, share) * self._most)
        is_known = self._finished >= _MIN_FINISHED
        means = self._tokens / np.maximum(1, self._finished)
        known = is_known[self._group_of]
        expected[known] = np.minimum(means[self._group_of][known], self._most[known])
        return expected

    def after(self, places: NDArray[np.int64], num_tokens: float) -> NDArray[np.float64]:
        """Return the expected output tokens of lines that have `num_tokens` without having ended.

        That is as many again, but not more than they may have.
        """
        return np.minimum(2 * num_tokens, self._most[places])
