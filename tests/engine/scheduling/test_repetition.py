"""Where a sequence repeats itself: told at the very token, for every size of pattern."""

from __future__ import annotations

import numpy as np
import pytest

from tidemill.engine.scheduling.repetition import Repetition


def first_place(tokens: list[int], wanted: Repetition) -> int | None:
    """Return after how many tokens a watch says that a sequence repeats itself."""
    watch = wanted.watch()
    return next((n for n, token in enumerate(tokens, start=1) if watch.push(token)), None)


def has_copies(tokens: list[int], wanted: Repetition) -> bool:
    """Say by slices whether tokens end in the copies that are wanted."""
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
def test_copies_are_told_with_the_last_of_them(
    tokens: list[int], wanted: Repetition, place: int | None
) -> None:
    """Not one token later, and not where a copy is missing or a pattern too short."""
    assert first_place(tokens, wanted) == place


@pytest.mark.parametrize("seed", range(8))
def test_it_is_told_where_slices_show_it(seed: int) -> None:
    """At every place of random tokens of a small alphabet, for random bounds."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, 300).tolist()
    low = int(rng.integers(1, 4))
    wanted = Repetition(low, low + int(rng.integers(0, 5)), int(rng.integers(2, 5)))
    tokens += tokens[-low:] * wanted.num_copies
    watch = wanted.watch()
    told = [watch.push(token) for token in tokens]
    assert told == [has_copies(tokens[: n + 1], wanted) for n in range(len(tokens))]
    assert told[-1]
