"""Tests of the accuracy of decisions."""

from __future__ import annotations

import pytest

from tidemill.batch.calibration.accuracy import Accuracy

_ROWS = [[0.95, 0.05], [0.95, 0.05], [0.35, 0.65], [0.35, 0.65], [0.45, 0.55]]
_GOLD = [0, 0, 1, 0, 0]


def test_accuracy_is_given_by_threshold_with_the_rows_behind_it() -> None:
    """Each threshold has the count, the share and the accuracy of the rows above it."""
    found = Accuracy.measure(_ROWS, _GOLD)
    assert found.accuracy == pytest.approx(3 / 5)
    by_threshold = {each.threshold: each for each in found.by_threshold}
    assert by_threshold[0.0].num_rows == 5
    assert (by_threshold[0.6].num_rows, by_threshold[0.6].share) == (4, 0.8)
    assert by_threshold[0.6].accuracy == 0.75
    assert (by_threshold[0.98].num_rows, by_threshold[0.98].accuracy) == (0, 0.0)
    # Wilson's interval of 2 of 2 at 95 % begins at 0.342.
    assert by_threshold[0.9].at_least == pytest.approx(0.342, abs=0.001)


def test_a_target_accuracy_accepts_as_many_rows_as_possible() -> None:
    """Targets that no threshold reaches are left out."""
    found = dict(Accuracy.measure(_ROWS, _GOLD).by_target)
    assert (found[0.99].threshold, found[0.99].num_rows) == (0.95, 2)
    assert 0.99 not in dict(Accuracy.measure([[0.9, 0.1]], [1]).by_target)


def test_the_calibration_error_is_the_weighted_distance_of_the_bins() -> None:
    """Five rows in three bins: |0.95 - 1| × 2, |0.65 - 0.5| × 2 and |0.55 - 0| × 1."""
    found = Accuracy.measure(_ROWS, _GOLD)
    assert found.calibration_error == pytest.approx((0.05 * 2 + 0.15 * 2 + 0.55) / 5)
    assert [each.num_rows for each in found.bins] == [1, 2, 2]
