"""Rows that are rotated and quantised to int8, by kernels that every processor has."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.cpu import int8
from tidemill.engine.kernels.quantised import (
    quantise_int8,
    rotated,
    rotation_of,
    rounded_to_int8,
)

WIDTH = 192


def random(*shape: int, seed: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(x: Tensor) -> Tensor:
    """Return inputs three of which are thirty times as large, as in trained models."""
    x = x.clone()
    x[:, [5, 70, 71]] *= 30
    return x


def test_a_rotation_is_a_product_with_hadamards_matrix() -> None:
    """Each group of neighbours is rotated; a second rotation restores it."""
    x = random(3, WIDTH, seed=0)
    pair = np.array([[1, 1], [1, -1]])
    matrix = np.kron(np.eye(WIDTH // 64), reduce(np.kron, [pair] * 6) / 8)
    np.testing.assert_allclose(rotated(x, 64).numpy(), x.numpy() @ matrix, atol=1e-5)
    torch.testing.assert_close(rotated(rotated(x, 16), 16), x)
    assert torch.equal(rotated(x, 1), x)


@pytest.mark.parametrize(
    ("widths", "size"), [((576,), 64), ((96,), 1), ((0, 64), 64), ((8, 64), 1)]
)
def test_inputs_are_rotated_where_a_whole_number_of_blocks_is_kept(
    widths: tuple[int], size: int
) -> None:
    """A rank's columns begin and end with a block."""
    assert rotation_of(*widths) == size


@pytest.mark.parametrize("rotation", [1, 64])
def test_rows_are_rotated_and_rounded(rotation: int) -> None:
    """The numbers stand for the rotated row, to half a step."""
    x = with_outliers(random(70, WIDTH, seed=1))
    rows = int8.quantise_rows(x, rotation)
    wanted = rotated(x, rotation)
    torch.testing.assert_close(rows.scales * 127, wanted.abs().amax(1))
    apart = (rows.numbers.float() - 128) * rows.scales[:, None] - wanted
    assert (apart.abs() <= 0.501 * rows.scales[:, None]).all()


@pytest.mark.parametrize("is_sum", [True, False])
def test_the_norm_before_a_layer_rotates_and_rounds(*, is_sum: bool) -> None:
    """It matches the norm followed by a separate pass."""
    x, residual, norm = random(40, WIDTH, seed=2), random(40, WIDTH, seed=3), random(WIDTH, seed=4)
    kept = residual.clone()
    rows = int8.add_rms_norm(x if is_sum else None, residual, norm, 1e-5, 64)
    summed = kept + x if is_sum else kept
    wanted = rotated(reference.rms_norm(summed, norm, 1e-5), 64)
    apart = (rows.numbers.float() - 128) * rows.scales[:, None] - wanted
    assert (apart.abs() <= 0.501 * rows.scales[:, None] + 1e-5).all()
    torch.testing.assert_close(residual, summed)


def test_a_product_of_inputs_with_outliers_loses_less_where_both_are_rotated() -> None:
    """The rounding error is at most a third as large."""
    weight, x = random(96, WIDTH, seed=5), with_outliers(random(50, WIDTH, seed=6))

    def distance(rotation: int) -> float:
        made = quantise_int8(weight, rotation).dequantised()
        got = rounded_to_int8(x, rotation) @ made.T
        return float(torch.linalg.vector_norm(got - x @ weight.T))

    assert distance(64) < distance(1) / 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_such_a_scale(value: float) -> None:
    """Other rows do not have one."""
    x = random(3, WIDTH, seed=7)
    x[1, 3] = value
    scales = int8.quantise_rows(x, 64).scales
    assert scales.isfinite().tolist() == [True, False, True]
