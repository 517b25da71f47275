"""N-gram lookup: earlier occurrences of a sequence's last tokens, in it or in finished ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .jit_cache import compiled

LEAST_MATCH = 3
"""Fewer common tokens predict little of the next ones."""

MOST_MATCH = 16
"""More common tokens do not predict more."""

_GRAM = 4  # tokens of a hashed n-gram of finished rows
_END = np.int32(-1)  # after each of them


class NgramMatches(NamedTuple):
    """Longest matches of the last tokens of some slots: the place after a match, and its length.

    For finished rows `places` are below 0: the number of a token there is `-1 - place`.
    """

    places: NDArray[np.int64]
    lengths: NDArray[np.int64]


class FinishedRows:
    """Tokens of the rows finished last, with an index by n-gram that finds the newest of each."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.tokens = np.full(capacity, _END, np.int32)
        self.heads = np.zeros(capacity, np.int32)  # places after n-grams, by their hash
        self._end = 0

    def add(self, token_ids: NDArray[np.int32]) -> None:
        """Add a row, replacing the oldest ones if there is no room."""
        token_ids = token_ids[: len(self.tokens) // 2]
        if self._end + len(token_ids) + 1 > len(self.tokens):
            self._end = 0
        start, self._end = self._end, self._end + len(token_ids) + 1
        self.tokens[start : self._end - 1] = token_ids
        self.tokens[self._end - 1] = _END
        _index(self.tokens, self.heads, start, self._end - 1)


def find_matches(
    tokens: NDArray[np.int32],  # [slots, L]
    slots: NDArray[np.int64],
    num_known: NDArray[np.int64],  # of each slot, its known tokens
    finished: FinishedRows,
) -> NgramMatches:
    """Return the longest match of each slot, the latest if several are as long; 0 for none."""
    matches = NgramMatches(*np.zeros((2, len(slots)), np.int64))
    _find(tokens, slots, num_known, (finished.tokens, finished.heads), matches)
    return matches


def write_drafts(
    tokens: NDArray[np.int32],  # [slots, L]
    slots: NDArray[np.int64],
    num_known: NDArray[np.int64],
    finished: FinishedRows,
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> None:
    """Write the drafted tokens after the known tokens, and their numbers to `counts`.

    A match that reaches the end of its sequence continues with the drafted tokens, so it repeats.
    """
    _copy(tokens, slots, num_known, finished.tokens, places, counts)


@compiled
def _hash(tokens: Any, end: Any) -> Any:
    """Return the hash of the n-gram before `end`."""
    value = np.uint64(0)
    for i in range(end - _GRAM, end):
        value = (value ^ np.uint64(np.uint32(tokens[i]))) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value


@compiled
def _index(tokens: Any, heads: Any, start: Any, stop: Any) -> None:
    for end in range(start + _GRAM, stop):
        heads[np.int64(_hash(tokens, end) % np.uint64(len(heads)))] = end


@compiled
def _common(tokens: Any, end: Any, others: Any, other_end: Any) -> Any:
    """Return how many tokens before two places are equal."""
    count = 0
    while (
        count < MOST_MATCH
        and count < end
        and count < other_end
        and tokens[end - 1 - count] == others[other_end - 1 - count]
    ):
        count += 1
    return count


@compiled
def _find(tokens: Any, slots: Any, num_known: Any, rows: Any, matches: Any) -> None:
    (finished, heads), (places, lengths) = rows, matches
    for i in range(len(slots)):
        row, end = tokens[slots[i]], num_known[i]
        best, place = np.int64(LEAST_MATCH - 1), np.int64(0)
        for before in range(end - 1, LEAST_MATCH - 1, -1):
            if row[before - 1] == row[end - 1] and row[before - 2] == row[end - 2]:
                count = np.int64(_common(row, end, row, before))
                if count > best:
                    best, place = count, np.int64(before)
                    if best == MOST_MATCH:
                        break
        if best < MOST_MATCH and end >= _GRAM:
            behind = np.int64(heads[np.int64(_hash(row, end) % np.uint64(len(heads)))])
            if behind:
                count = np.int64(_common(row, end, finished, behind))
                if count > best:
                    best, place = count, -1 - behind
        places[i], lengths[i] = place, best if best >= LEAST_MATCH else 0


@compiled
def _copy(tokens: Any, slots: Any, num_known: Any, finished: Any, places: Any, counts: Any) -> None:
    for i in range(len(slots)):
        row, end, place = tokens[slots[i]], num_known[i], places[i]
        for j in range(counts[i]):
            token = _END
            if place >= 0:
                token = row[place + j]
            elif j - 1 - place < len(finished):
                token = finished[j - 1 - place]
            if token < 0:
                counts[i] = j
                break
            row[end + j] = token
