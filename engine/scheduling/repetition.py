"""Repetition detection: finds repeated patterns with each new token, in constant time.

For each pattern length it counts the latest tokens that equal the token at that distance before
them. The copies of a pattern are complete once the count spans all of them except the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Repetition:
    """`num_copies` of one pattern of `min_size` to `max_size` tokens at the end of a sequence."""

    min_size: int
    max_size: int
    num_copies: int

    def watch(self) -> RepetitionWatch:
        """Return a watch for one sequence."""
        return RepetitionWatch(self)


class RepetitionWatch:
    """Watches the generated tokens of one sequence; called once for each."""

    __slots__ = ("_last", "_needed", "_runs", "_sizes")

    def __init__(self, wanted: Repetition) -> None:
        self._sizes = np.arange(wanted.min_size, wanted.max_size + 1)
        self._needed = self._sizes * (wanted.num_copies - 1)
        self._runs = np.zeros_like(self._sizes)
        self._last = np.full(wanted.max_size, -1, np.int64)  # the newest first

    def push(self, token_id: int) -> bool:
        """Append one generated token; return whether the copies are complete."""
        goes_on = self._last[self._sizes - 1] == token_id
        self._runs = np.where(goes_on, self._runs + 1, 0)
        self._last[1:] = self._last[:-1]
        self._last[0] = token_id
        return bool((self._runs >= self._needed).any())
