"""The GPU's norms and gates, each against its reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.triton.mutating import Mutation, assert_found, each_of
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.triton import elementwise

WIDTHS = [1, 15, 16, 17, 96]
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3}
GATES = [
    Gate(),
    Gate("gelu"),
    Gate("gelu_tanh"),
    Gate(alpha=1.702, limit=0.7, beta=1.0),
]


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Hold a kernel's numbers to exact ones, but for one rounding to its dtype."""
    bound = BOUND[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=bound, rtol=bound)


def check_norms(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Hold each norm to torch's, for rows that end within a block and at its end."""
    for width in WIDTHS:
        x = torch.randn(3, width).to(dtype)
        weight, bias = torch.randn(width), torch.randn(width).to(dtype)
        exact = [numbers.double() for numbers in (x, weight, bias)]
        assert_near(module.rms_norm(x, weight, 1e-2), reference.rms_norm(*exact[:2], 1e-2))
        normed = module.layer_norm(x, weight, bias, 1e-2)
        assert_near(normed, reference.layer_norm(*exact, 1e-2))


def check_sums(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Hold each norm of a sum to the norm of what the residual has become."""
    for width in WIDTHS:
        x, residual = torch.randn(2, 3, width).to(dtype)
        weight, bias = torch.randn(2, width).to(dtype)
        added = residual + x
        for add, norm in (
            (partial(module.add_rms_norm, weight=weight), module.rms_norm),
            (partial(module.add_layer_norm, weight=weight, bias=bias), module.layer_norm),
        ):
            own = residual.clone()
            got = add(x, own, eps=1e-2)
            assert torch.equal(own, added)
            biases = (bias,) if norm is module.layer_norm else ()
            assert torch.equal(got, norm(added, weight, *biases, 1e-2))


def check_gates(module: ModuleType, dtype: torch.dtype = torch.float32) -> None:
    """Hold each gate to torch's, for columns that fill no block, one, and more."""
    for width in (1, 17, 1024, 1100):
        both = (2 * torch.randn(2, 2 * width)).to(dtype)
        for gate in GATES:
            expected = reference.act_and_mul(both.double(), gate)
            assert_near(module.act_and_mul(both, gate), expected)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_norm_is_torchs(dtype: torch.dtype) -> None:
    """Whatever the width, whatever the dtypes of weights."""
    check_norms(elementwise, dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_norm_of_a_sum_leaves_the_sum(dtype: torch.dtype) -> None:
    """Rounded, as it is normed."""
    check_sums(elementwise, dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_gate_is_torchs(dtype: torch.dtype) -> None:
    """Each curve, with limits and without."""
    check_gates(elementwise, dtype)


def test_gemmas_weight_is_widened_before_one_is_added() -> None:
    """A small weight would be lost in a narrow sum."""
    stored = torch.tensor([2**-10], dtype=torch.bfloat16)
    assert elementwise.norm_weight(stored, 1.0).item() == 1 + 2**-10


def test_rows_may_lie_apart_or_deeper() -> None:
    """A part of a wider tensor, and one of transformers' shapes."""
    wide, weight = torch.randn(2, 3, 40), torch.randn(20)
    expected = reference.rms_norm(wide[..., :20], weight, 1e-5)
    torch.testing.assert_close(elementwise.rms_norm(wide[..., :20], weight, 1e-5), expected)
    torch.testing.assert_close(elementwise.rms_norm(wide[0, :, :20], weight, 1e-5), expected[0])
    joined = reference.act_and_mul(wide, Gate())
    torch.testing.assert_close(elementwise.act_and_mul(wide, Gate()), joined)


def test_of_no_rows_nothing_comes() -> None:
    """Steps may have none."""
    x, weight = torch.randn(0, 16), torch.randn(16)
    assert elementwise.rms_norm(x, weight, 1e-5).shape == (0, 16)
    assert elementwise.act_and_mul(x, Gate()).shape == (0, 8)


def test_what_is_no_number_stays_so() -> None:
    """Also where a limit cuts off."""
    both = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]])
    assert elementwise.act_and_mul(both, Gate(limit=1.0)).isnan().all()


MISTAKES = {
    check_norms: [
        Mutation(
            "is_there = columns < width\n    numbers", "is_there = columns < width - 1\n    numbers"
        ),
        Mutation("tl.sum(numbers * numbers, 0) / width", "tl.sum(numbers * numbers, 0) / BLOCK"),
        Mutation("tl.sum(numbers, 0) / width, 0.0)", "tl.sum(numbers, 0) / width, 1.0)"),
        Mutation(
            "tl.int64) * width\n    columns = tl.arange", "tl.int64)\n    columns = tl.arange"
        ),
    ],
    check_sums: [Mutation("numbers = added.to", "numbers = 1 + added.to")],
    check_gates: [
        Mutation(
            "is_there = columns < width\n    gate", "is_there = columns < width - 1\n    gate"
        ),
        Mutation("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK + 1)"),
        Mutation("both + 2 * row + width", "both + 2 * row + width - 1"),
        Mutation("up < -LIMIT", "up < LIMIT"),
    ],
}


@pytest.mark.parametrize(("check", "mistake"), each_of(MISTAKES))
def test_a_mistake_is_found(
    check: Callable[[ModuleType], None], mistake: Mutation, tmp_path: Path
) -> None:
    """A bound that is off, or a mean over a block."""
    assert_found(check, elementwise, mistake, tmp_path)
