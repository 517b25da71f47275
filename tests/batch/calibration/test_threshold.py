"""Thresholds of confidence that reach a target accuracy."""

from __future__ import annotations

import random

import pytest

from tidemill.batch.calibration.threshold import GoldRow, find_threshold


def test_the_lowest_threshold_that_reaches_the_target_is_found() -> None:
    """It accepts as many rows as possible, and equal confidences together."""
    sure = [GoldRow(0.9 + place / 1000, 1, 1) for place in range(19)]
    unsure = [GoldRow(0.6, place % 2, 1) for place in range(20)]
    found = find_threshold([*unsure, *sure, GoldRow(0.8, 0, 1)], 0.95)
    assert (found.value, found.num_rows, found.num_accepted) == (0.8, 40, 20)
    assert found.accuracy == pytest.approx(0.95)
    assert find_threshold(unsure, 0.5).value == 0.6
    assert find_threshold(unsure, 0.6).value is None
    assert find_threshold(sure[:9], 0.6).value is None


def test_the_check_shows_a_threshold_that_is_right_by_chance() -> None:
    """Confidences that say nothing reach the target on the rows that chose it, not on others."""
    rng = random.Random(5)
    rows = [GoldRow(rng.random(), rng.randrange(2), 1) for _ in range(300)]
    found = find_threshold(rows, 0.7)
    assert found.accuracy is not None
    assert found.checked_accuracy is not None
    assert found.accuracy >= 0.7
    assert found.checked_accuracy < 0.65
