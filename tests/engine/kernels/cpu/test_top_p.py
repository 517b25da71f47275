"""The cut of a row, compared with a sort."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill.engine.kernels.cpu.simd import LANES
from tidemill.engine.kernels.cpu.top_p import NUM_FEW, TILE, find_threshold

SIZES = [TILE, 4 * NUM_FEW]
KINDS = {
    "spread": lambda rng, n: rng.normal(0, 2, n),
    "flat": lambda rng, n: rng.normal(0, 0.01, n),
    "peaked": lambda rng, n: np.where(rng.random(n) < 3 / n, 30, rng.normal(0, 1, n)),
    "tied": lambda rng, n: rng.normal(0, 2, n).round(),
    "equal": lambda _, n: np.full(n, 2.5),
    "few": lambda rng, n: np.where(rng.random(n) < 40 / n, rng.normal(0, 1, n), -np.inf),
}


def order(value: np.float32) -> np.int32:
    """Return the order of a number that is not negative, its bits, or of one that is."""
    bits = np.int64(np.float32(value + 0.0).view(np.int32))
    return np.int32(bits if bits >= 0 else -(2**31) - bits)


def found(x: NDArray[np.float32], goal: float, *, by_mass: bool) -> np.int32:
    """Return what `least_kept` finds."""
    peaks = x.reshape(-1, TILE).max(axis=1)
    total = x.sum(dtype=np.float64) if by_mass else float(len(x))
    few = np.empty(NUM_FEW + LANES, np.float32)
    return np.int32(find_threshold(x, peaks, goal, total, order(x.max()), few, by_mass=by_mass))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_count_is_reached_where_a_sort_has_it(kind: str, size: int) -> None:
    """The first, the last, and some between; ties go together."""
    x = KINDS[kind](np.random.default_rng(0), size).astype(np.float32)
    sorted_x = np.sort(x)[::-1]
    for count in (1, 2, 50, 700, size // 2, size - 1, size):
        assert found(x, float(count), by_mass=False) == order(sorted_x[count - 1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mass_is_reached_where_a_sort_has_it(kind: str, size: int) -> None:
    """Goals are in the middle of a token, where rounding does not matter."""
    logits = KINDS[kind](np.random.default_rng(1), size)
    x = np.exp(logits - logits.max()).astype(np.float32)
    sorted_x = np.sort(x)[::-1]
    covered = sorted_x.cumsum(dtype=np.float64)
    for last in (0, 1, 7, 200, size // 3):
        if sorted_x[last] > 1e-5 * covered[last]:
            goal = covered[last] - float(sorted_x[last]) / 2
            assert found(x, goal, by_mass=True) == order(sorted_x[last])


def test_a_sample_that_misses_all_that_counts_costs_time_alone() -> None:
    """Nearly all of the mass lies between the places that are looked at first."""
    x = np.full(4 * NUM_FEW, 1e-6, np.float32)
    x[1::4] = np.linspace(0.5, 1, NUM_FEW)
    sorted_x = np.sort(x)[::-1]
    covered = sorted_x.cumsum(dtype=np.float64)
    for last in (10, 4000, NUM_FEW - 5):
        goal = covered[last] - float(sorted_x[last]) / 2
        assert found(x, goal, by_mass=True) == order(sorted_x[last])
