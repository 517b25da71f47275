"""Repetition of a sequence is detected at the exact token, for every size of pattern."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.engine.scheduling.repetition import Repetition


def first_place(tokens: list[int], wanted: Repetition) -> int | None:
    """Return the number of tokens after which a watch detects a repetition."""
    watch = wanted.watch()
    return next((n for n, token in enumerate(tokens, start=1) if watch.push(token)), None)


def has_copies(tokens: list[int], wanted: Repetition) -> bool:
    """Return whether tokens end in the required copies, by comparing slices."""
    for size in range(wanted.min_size, wanted.max_size + 1):
        length = size * wanted.num_copies
        if len(tokens) >= length and tokens[-length:] == tokens[-size:] * wanted.num_copies:
            return True
    return False


@pytest.mark.parametrize(
    ("tokens", "wanted", "place"),
    [
        ([5, 5, 5], Repetition(1, 1, 3), 3),
        ([5, 5, 5], Repetition(1, 1, 4), None),
        ([9, 1, 2, 1, 2, 1, 2, 1], Repetition(1, 4, 3), 7),
        ([1, 2, 1, 2], Repetition(3, 4, 2), None),
        ([1, 1, 1, 1], Repetition(2, 2, 2), 4),
        ([0, 0], Repetition(1, 1, 2), 2),
    ],
)
def test_copies_are_detected_with_the_last_of_them(
    tokens: list[int], wanted: Repetition, place: int | None
) -> None:
    """A missing copy or a too short pattern is not detected."""
    assert first_place(tokens, wanted) == place


@pytest.mark.parametrize("seed", range(8))
def test_detection_matches_slices(seed: int) -> None:
    """It holds at every position of random tokens from a small alphabet, for random limits."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, 300).tolist()
    low = int(rng.integers(1, 4))
    wanted = Repetition(low, low + int(rng.integers(0, 5)), int(rng.integers(2, 5)))
    tokens += tokens[-low:] * wanted.num_copies
    watch = wanted.watch()
    detected = [watch.push(token) for token in tokens]
    assert detected == [has_copies(tokens[: n + 1], wanted) for n in range(len(tokens))]
    assert detected[-1]
