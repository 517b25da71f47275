"""The CPU's int8 layers, against integer sums, with the fused norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.backends import choose_linear
from tidemill.engine.kernels.cpu import elementwise, int8
from tidemill.engine.kernels.cpu.linear_panels import ROWS, WIDTH
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.linear import Epilogue
from tidemill.engine.kernels.quantised import Quantised, quantise_int8

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not int8.supports(BF16), reason="no AVX512-VNNI on this processor")


def random(*shape: int, seed: int) -> Tensor:
    """Return normal numbers in bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def made(weight: Quantised, bias: Tensor | None = None, end: Epilogue = None) -> int8.Int8Linear:
    """Return the kernel's layer, which must exist."""
    layer = int8.prepare(weight, bias, end)
    assert layer is not None
    return layer


def exact(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Return the product of quantised rows as whole numbers, scaled once."""
    rows = int8.quantise_rows(x, weight.rotation)
    sums = (rows.numbers.double() - 128) @ weight.numbers.double().T
    scaled = sums * rows.scales.double()[:, None] * weight.scales.double().T
    return scaled if bias is None else scaled + bias.double()


@pytest.mark.parametrize("end", [None, Gate(), Gate(alpha=1.702, limit=1.5, beta=1.0), "gelu"])
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(WIDTH, 64), (2, 4), (50, 68), (1000, 512)])
def test_it_is_the_product_of_whole_numbers(
    outputs: int, inputs: int, end: Epilogue, *, is_biased: bool
) -> None:
    """Any shape and number of rows works, with one rounding after the epilogue."""
    weight = quantise_int8(random(outputs, inputs, seed=0))
    bias = random(outputs, seed=1) if is_biased else None
    layer = made(weight, bias, end)
    for rows in (0, 1, ROWS, 5 * ROWS + 3):
        x = random(rows, inputs, seed=rows)
        expected = exact(x, weight, bias).float()
        if isinstance(end, Gate):
            expected = reference.act_and_mul(expected, end)
        elif end is not None:
            expected = reference.activate(expected, end)
        torch.testing.assert_close(layer(x).float(), expected, rtol=2**-8, atol=1e-5)


def test_the_largest_sums_do_not_wrap() -> None:
    """Neither do pairs of products saturate, as in older instructions."""
    weight = torch.ones(WIDTH, 16_384, dtype=BF16)
    weight[1::2] = -1
    x = torch.ones(2, 16_384, dtype=BF16)
    x[1] = -1
    layer = made(quantise_int8(weight, 1))
    assert torch.equal(layer(x), x @ weight.T)


def test_rows_are_quantised_by_their_largest_number() -> None:
    """The largest becomes 127, others are rounded to the nearest, and zeros stay zeros."""
    x = random(300, 33, seed=2) * torch.logspace(-20, 20, 300)[:, None].to(BF16)
    x[7] = 0
    rows = int8.quantise_rows(x)
    largest = x.float().abs().amax(1)
    torch.testing.assert_close(rows.scales * 127, largest)
    apart = (rows.numbers.float() - 128) * rows.scales[:, None] - x.float()
    assert (apart.abs() <= 0.5001 * rows.scales[:, None]).all()
    assert (rows.numbers[7] == 128).all()


@pytest.mark.parametrize("is_sum", [True, False])
def test_the_norm_before_it_quantises(*, is_sum: bool) -> None:
    """It matches the norm followed by a separate pass, and the residual is the same."""
    x, residual, weight = (random(40, 96, seed=seed) for seed in (3, 4, 5))
    norm, kept = weight[0].float(), residual.clone()
    rows = int8.add_rms_norm(x if is_sum else None, residual, norm, 1e-5)
    expected = (
        elementwise.add_rms_norm(x.float(), kept.float(), norm, 1e-5)
        if is_sum
        else elementwise.rms_norm(kept.float(), norm, 1e-5)
    )
    apart = (rows.numbers.float() - 128) * rows.scales[:, None] - expected
    assert (apart.abs() <= 0.51 * rows.scales[:, None] + 2**-7 * expected.abs()).all()
    assert torch.equal(residual, (kept.float() + x.float()).to(BF16) if is_sum else kept)
    layer = made(quantise_int8(random(70, 96, seed=6)))
    got = layer.normed(norm, 1e-5)(None, residual)
    alone = layer(elementwise.rms_norm(residual, norm, 1e-5))
    torch.testing.assert_close(got, alone, rtol=0.05, atol=0.6)


def test_a_row_comes_to_the_same_alone_and_in_company() -> None:
    """Bit for bit, so that no request changes another."""
    layer = made(quantise_int8(random(96, 320, seed=7)), None, Gate())
    x = random(5 * ROWS + 3, 320, seed=8)
    together = layer(x)
    for rows in range(1, 2 * ROWS):
        assert torch.equal(layer(x[7 : 7 + rows]), together[7 : 7 + rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_numbers_stay_in_their_row(value: float) -> None:
    """NaN and infinity appear there, whether from rows, from a norm, or from a weight."""
    weight = random(70, 40, seed=9)
    x = random(3, 40, seed=10)
    x[1, 3] = value
    layer = made(quantise_int8(weight))
    for got in (layer(x), layer.normed(torch.ones(40), 1e-6)(None, x)):
        assert not got[1].isfinite().any()
        assert got[[0, 2]].isfinite().all()
    weight[5, 0] = value
    got = made(quantise_int8(weight))(x[:1])
    assert not got[0, 5].isfinite()
    assert got[0, 6:].isfinite().all()


def test_a_model_has_it_where_weights_are_int8() -> None:
    """Layers have a gate or none; layers without whole words are dequantised."""
    linear = choose_linear(elementwise, torch.device("cpu"))
    weight, bias = quantise_int8(random(64, 32, seed=11)), random(64, seed=12)
    assert isinstance(linear.make(weight, bias), int8.Int8Linear)
    assert isinstance(linear.make_gated(weight, bias, Gate()), int8.Int8Linear)
    assert not linear.needs_torch
    odd = quantise_int8(random(64, 31, seed=13))
    x = random(2, 31, seed=14)
    assert torch.equal(linear.make(odd)(x), torch.nn.functional.linear(x, odd.dequantised()))
    assert linear.needs_torch
