"""Which sequences run together where none has a past: sorted by length, packed by their tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pack_steps(
    lengths: NDArray[np.int64], max_tokens: int, max_sequences: int
) -> list[NDArray[np.int64]]:
    """Return which of some sequences each step runs, the longest first, without padding.

    A step has at most `max_tokens`, or one sequence that alone has more.
    """
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    steps = []
    start, done = 0, 0
    while start < len(order):
        fitting = int(np.searchsorted(ends, done + max_tokens, side="right"))
        stop = min(max(fitting, start + 1), start + max_sequences)
        steps.append(order[start:stop])
        start, done = stop, int(ends[stop - 1])
    return steps
