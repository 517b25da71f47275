"""The CPU's norms and gates, against torch's."""

from __future__ import annotations

import pytest
import torch

from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.cpu import elementwise as cpu_blocks
from tidemill.engine.kernels.cpu.elementwise import act_and_mul, add_rms_norm, rms_norm
from tidemill.engine.kernels.cpu.scalars import DTYPES
from tidemill.engine.kernels.elementwise import ElementwiseOps, Gate

ROWS = [1, 3, 700]
SILU = Gate()
GATES = [SILU, Gate("gelu_tanh"), Gate("gelu"), Gate(alpha=1.702, limit=1.5, beta=1.0)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_that_of_torch(dtype: torch.dtype, rows: int) -> None:
    """Rows may have values of any size, and the result has the input's dtype."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(1, rows, 96, generator=generator) * 10.0 ** (rows % 4 - 2)).to(dtype)
    weight = torch.randn(96, generator=generator)
    out = rms_norm(x, weight, 1e-5)
    expected = torch.nn.functional.rms_norm(x.double(), (96,), weight.double(), 1e-5)
    assert out.dtype == dtype
    assert out.shape == x.shape
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=tolerance)


def test_rms_norm_takes_the_heads_of_a_wider_row() -> None:
    """A slice of merged projections is not contiguous."""
    x = torch.randn(1, 5, 12, 16, generator=torch.Generator().manual_seed(0))[:, :, 4:8]
    weight = torch.ones(16)
    out = rms_norm(x, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_rms_norm_of_zeros_is_zeros() -> None:
    """The epsilon keeps the scale finite."""
    assert not rms_norm(torch.zeros(2, 96), torch.ones(96), 1e-6).any()


@pytest.mark.parametrize("blocks", [reference, cpu_blocks], ids=["reference", "cpu"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_that_of_torch(dtype: torch.dtype, rows: int, blocks: ElementwiseOps) -> None:
    """A single row and its sum with the residual, which is stored, agree."""
    generator = torch.Generator().manual_seed(rows)
    x, residual = ((torch.randn(rows, 96, generator=generator) * 3 + 5).to(dtype) for _ in range(2))
    numbers = [torch.randn(96, generator=generator).to(dtype) for _ in range(2)]
    weight, bias = (blocks.norm_weight(number, 0.0) for number in numbers)
    exact = [number.double() for number in numbers]
    summed = x + residual
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for got, of in (
        (blocks.layer_norm(x, weight, bias, 1e-12), x),
        (blocks.add_layer_norm(x, residual, weight, bias, 1e-12), summed),
    ):
        expected = torch.nn.functional.layer_norm(of.double(), (96,), *exact, 1e-12)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_is_that_of_torch(dtype: torch.dtype, rows: int) -> None:
    """Inputs range from where the sigmoid is 0 to where it is 1; the result is rounded once."""
    generator = torch.Generator().manual_seed(rows)
    gate = (torch.randn(1, rows, 96, generator=generator) * 12).to(dtype)
    up = torch.randn(1, rows, 96, generator=generator).to(dtype)
    out = act_and_mul(torch.cat([gate, up], dim=-1), SILU)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_is_closed_and_open_at_its_ends(dtype: torch.dtype) -> None:
    """Large inputs do not overflow, and NaN and infinity are preserved."""
    gate = torch.tensor([[-1e30, -300.0, 0.0, 300.0, 1e30, torch.nan]], dtype=dtype)
    out = act_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1), SILU)[0]
    assert out[:3].abs().max() < 1e-6
    torch.testing.assert_close(out[3:5], gate[0, 3:5], rtol=2e-7, atol=0)
    assert out[5].isnan()


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Rounding is to nearest, ties to even, up into the next exponent and beyond the largest."""
    weight = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 2 - 2**-8, 1 + 2**-8 + 2**-20, -3.3896e38])
    normed = rms_norm(torch.ones(1, 5, dtype=torch.bfloat16), weight, 0.0)
    assert torch.equal(normed[0], weight.bfloat16())
    both = torch.cat([torch.full_like(normed, 64.0), normed], dim=-1)
    assert not act_and_mul(both, SILU)[0, 4].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_numbers_go_through_norm_and_gate(dtype: torch.dtype, value: float) -> None:
    """It affects its own row, and no other."""
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 5] = value
    for out in (rms_norm(x, torch.ones(64), 1e-6), act_and_mul(x, SILU)):
        assert not out[1].isfinite().all()
        assert out[[0, 2]].isfinite().all()


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a result with the fp32 reference, up to one rounding."""
    tolerance = 5e-6 if got.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.float(), expected, atol=2e-6, rtol=tolerance)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_rounded_before_its_norm(dtype: torch.dtype, rows: int) -> None:
    """The residual becomes the sum, as torch adds in that dtype, and the norm is of that."""
    generator = torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator)
    expected = x + residual
    out = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    close(out, torch.nn.functional.rms_norm(expected.float(), (96,), weight, 1e-5))


@pytest.mark.parametrize("blocks", [reference, cpu_blocks], ids=["torch", "numba"])
def test_the_norm_offset_of_a_family_is_not_rounded(blocks: ElementwiseOps) -> None:
    """Gemma stores weight - 1: bf16 cannot represent most sums."""
    stored = torch.tensor([2**-9, -(2**-7) + 2**-12, 0.3]).bfloat16()
    x = torch.full((2, 3), 2.0)
    for dtype in DTYPES:
        weight = blocks.norm_weight(stored, 1.0)
        out = blocks.rms_norm(x.to(dtype), weight, 0.0)
        assert torch.equal(out, (stored.float() + 1).to(dtype).expand(2, 3))
    assert torch.equal(blocks.norm_weight(stored, 0.0).float(), stored.float())


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_gate_is_that_of_the_reference(dtype: torch.dtype, gate: Gate) -> None:
    """Its curve, where it is cut off, and what it adds."""
    generator = torch.Generator().manual_seed(1)
    both = (torch.randn(70, 192, generator=generator) * 4).to(dtype)
    close(act_and_mul(both, gate), reference.act_and_mul(both.float(), gate))


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_nan_goes_through_every_gate(gate: Gate) -> None:
    """The NaN may be in either half."""
    both = torch.ones(3, 8)
    both[1, 1] = both[2, 6] = torch.nan
    assert act_and_mul(both, gate).isnan().nonzero().tolist() == [[1, 1], [2, 2]]
