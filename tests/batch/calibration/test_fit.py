"""Tests of the fit of probability maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest

from tidemill.batch.calibration.accuracy import Accuracy
from tidemill.batch.calibration.fit import (
    Fit,
    LogMeans,
    cross_validated,
    fit_isotonic,
    fit_platt,
    pooled_blocks,
)
from tidemill.batch.calibration.probability_maps import LinearMap, logarithms, softmax


def _rows(
    num_rows: int, scale: float, offsets: Sequence[float], seed: int = 0
) -> tuple[list[list[float]], list[int]]:
    """Return rows whose gold options follow softmax(`scale` × log p + `offsets`)."""
    random = Random(seed)
    rows, gold = [], []
    for _ in range(num_rows):
        row = softmax([random.gauss(0, 2) for _ in offsets])
        logs = zip(logarithms(row), offsets, strict=True)
        true = softmax([scale * log + offset for log, offset in logs])
        gold.append(random.choices(range(len(true)), true)[0])
        rows.append(row)
    return rows, gold


def test_batch_calibration_removes_a_constant_bias_of_the_labels() -> None:
    """A bias added to every row's log-probabilities does not change the calibrated ones."""
    random = Random(1)
    values = [[random.gauss(0, 1) for _ in range(3)] for _ in range(200)]
    biased = [softmax([a, b + 3, c - 2]) for a, b, c in values]
    fair, means = LogMeans(3), LogMeans(3)
    for row, odd in zip(values, biased, strict=True):
        fair.add(softmax(row))
        means.add(odd)
    prior = (0.2, 0.3, 0.5)
    for row, odd in zip(values, biased, strict=True):
        expected = fair.batch_map(prior)(softmax(row))
        assert means.batch_map(prior)(odd) == pytest.approx(expected)


def test_batch_calibration_of_equal_rows_returns_the_prior() -> None:
    """Rows that say nothing get the prior."""
    means = LogMeans(2)
    for _ in range(3):
        means.add([0.99, 0.01])
    assert means.batch_map([0.3, 0.7])([0.99, 0.01]) == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize("offsets", [(1.0, -1.0), (0.5, -1.5, 1.0, 0.0)])
def test_platt_scaling_finds_the_scale_and_the_offsets(offsets: tuple[float, ...]) -> None:
    """The fit on many rows is close to the map that made their gold options."""
    rows, gold = _rows(3_000, 0.4, offsets)
    fitted = fit_platt(rows, gold)
    assert fitted.scale == pytest.approx(0.4, abs=0.06)
    shifts = [found - true for found, true in zip(fitted.offsets, offsets, strict=True)]
    assert max(shifts) - min(shifts) < 0.3  # only differences between offsets matter


def test_platt_scaling_is_at_the_minimum_of_its_loss() -> None:
    """Every map nearby is less likely, except for the weak ridge."""
    rows, gold = _rows(300, 0.7, (0.3, -0.3, 0.1))
    fitted = fit_platt(rows, gold)

    def loss(scale: float, offsets: Sequence[float]) -> float:
        found = LinearMap(scale, tuple(offsets))
        pairs = zip(rows, gold, strict=True)
        return -sum(math.log(found(row)[answer]) for row, answer in pairs)

    least = loss(fitted.scale, fitted.offsets)
    for place in range(3):
        for shift in (-0.05, 0.05):
            moved = [each + shift * (at == place) for at, each in enumerate(fitted.offsets)]
            assert loss(fitted.scale, moved) > least
    assert min(loss(fitted.scale * each, fitted.offsets) for each in (0.97, 1.03)) > least


def test_platt_scaling_stretches_probabilities_that_are_nearly_equal() -> None:
    """A model that ranks well with differences of a hundredth becomes confident."""
    rows = [[0.5 + shift / 100, 0.5 - shift / 100] for shift in range(-9, 10)] * 4
    gold = [int(row[0] < 0.5) for row in rows]
    assert fit_platt(rows, gold)([0.59, 0.41])[0] > 0.99


def test_separable_and_reversed_gold_answers_have_finite_maps() -> None:
    """The scale stays finite if every answer is right, and is 0 if every answer is wrong."""
    rows = [[0.9, 0.1], [0.2, 0.8]] * 20
    right, wrong = fit_platt(rows, [0, 1] * 20), fit_platt(rows, [1, 0] * 20)
    assert right([0.9, 0.1])[0] > 0.95
    assert wrong.scale == 0
    assert wrong([0.9, 0.1]) == pytest.approx([0.5, 0.5])


def test_isotonic_blocks_equal_the_minimax_formula() -> None:
    """Pooled means equal the maximum of minima of all means over intervals."""
    random = Random(2)
    xs = [random.randrange(12) / 2 for _ in range(40)]
    hits = [random.random() < x / 6 for x in xs]
    values = sorted(set(xs))

    def mean(low: float, high: float) -> float:
        inside = [hit for x, hit in zip(xs, hits, strict=True) if low <= x <= high]
        return sum(inside) / len(inside)

    blocks = pooled_blocks(xs, hits)
    for x in values:
        lows, highs = [v for v in values if v <= x], [v for v in values if v >= x]
        expected = max(min(mean(low, high) for high in highs) for low in lows)
        [found] = [share for low, high, share in blocks if low <= x <= high]
        assert found == pytest.approx(expected)


def test_isotonic_maps_are_never_certain() -> None:
    """The probabilities stay off 0 and 1, add up to 1 and rise."""
    rows, gold = _rows(300, 2.0, (2.0, 0.0))
    fitted = fit_isotonic(rows, gold)
    found = [fitted([x / 100, 1 - x / 100]) for x in range(101)]
    assert [row[0] for row in found] == sorted(row[0] for row in found)
    assert all(1 / 302 * 0.9 < row[0] < 1 and sum(row) == pytest.approx(1) for row in found)


@pytest.mark.parametrize("fit", [fit_platt, fit_isotonic])
def test_cross_validation_does_not_flatter_noise(fit: Fit) -> None:
    """Answers that do not depend on the rows are not predicted better than by chance."""
    rows, gold = _rows(400, 0.0, (0.0, 0.0))
    held_out = Accuracy.measure(cross_validated(fit, rows, gold), gold)
    assert held_out.accuracy < 0.56


def test_calibration_lowers_the_calibration_error() -> None:
    """The expected calibration error is at most half after the fit, measured on held-out rows."""
    rows, gold = _rows(1_000, 0.3, (1.0, -1.0))
    before = Accuracy.measure(rows, gold)
    for fit in (fit_platt, fit_isotonic):
        after = Accuracy.measure(cross_validated(fit, rows, gold), gold)
        assert after.calibration_error < before.calibration_error / 2
        assert after.accuracy > before.accuracy
