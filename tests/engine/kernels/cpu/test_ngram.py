"""N-gram lookup: the longest match of a sequence's end, in it or in finished rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.engine.kernels.cpu.ngram import (
    LEAST_MATCH,
    MOST_MATCH,
    FinishedRows,
    find_matches,
    write_drafts,
)

SLOT = np.zeros(1, np.int64)


def drafts(known: list[int], count: int, finished: FinishedRows | None = None) -> list[int]:
    """Return the draft after some tokens."""
    tokens = np.zeros((1, len(known) + count), np.int32)
    tokens[0, : len(known)] = known
    rows, ends = finished or FinishedRows(64), np.array([len(known)])
    matches, counts = find_matches(tokens, SLOT, ends, rows), np.array([count])
    if matches.lengths[0]:
        write_drafts(tokens, SLOT, ends, rows, matches.places, counts)
        return [int(token) for token in tokens[0, len(known) : len(known) + counts[0]]]
    return []


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1]),
        ([1, 2, 3, 9, 8, 2, 3], []),  # two tokens say little
        ([5, 1, 2, 3, 7, 6, 1, 2, 3, 8, 5, 1, 2, 3], [7, 6, 1]),  # the longest, not the latest
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2]),  # the latest of those as long
        ([4, 1, 2, 1, 2, 1, 2], [1, 2, 1]),  # what repeats itself goes on
        ([6, 6, 6, 6], [6, 6, 6]),
        ([1], []),
    ],
)
def test_tokens_after_the_longest_match_are_drafted(known: list[int], expected: list[int]) -> None:
    """The match is in the sequence itself."""
    assert drafts(known, 3) == expected


def test_finished_rows_are_looked_up_too() -> None:
    """Rows are searched to their ends; a longer match precedes a shorter one in the sequence."""
    rows = FinishedRows(64)
    rows.add(np.array([1, 2, 3, 4, 5, 6], np.int32))
    assert drafts([9, 1, 2, 3, 4], 5, rows) == [5, 6]
    assert drafts([2, 3, 4, 8, 1, 2, 3, 4], 1, rows) == [5]
    assert drafts([0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4], 2, rows) == [7, 0]
    assert drafts([2, 3, 4], 2, rows) == []


def test_finished_rows_have_bounds() -> None:
    """The oldest make room; one too long is cut."""
    rows = FinishedRows(64)
    for first in range(10, 200, 10):
        rows.add(np.arange(first, first + 9, dtype=np.int32))
        assert drafts(list(range(first, first + 6)), 2, rows) == [first + 6, first + 7]
    assert drafts(list(range(10, 16)), 2, rows) == []
    rows.add(np.arange(1000, 1100, dtype=np.int32))
    assert drafts([1028, 1029, 1030, 1031], 2, rows) == []


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=5),
)
def test_a_match_is_one(known: list[int], finished: list[list[int]]) -> None:
    """It has the reported length; within a sequence none is longer."""
    rows = FinishedRows(128)
    for row in finished:
        rows.add(np.array(row, np.int32))
    tokens = np.array([known], np.int32)
    places, lengths = find_matches(tokens, SLOT, np.array([len(known)]), rows)
    place, length = int(places[0]), int(lengths[0])

    def common(end: int) -> int:
        pairs = zip(known[:end][::-1], known[::-1], strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), end)
        return min(count, MOST_MATCH)

    best = max((common(end) for end in range(1, len(known))), default=0)
    assert length >= (best if best >= LEAST_MATCH else 0)
    if place < 0:
        end = -1 - place
        assert rows.tokens[end - length : end].tolist() == known[len(known) - length :]
        assert length > best
    elif length:
        assert common(place) == length
