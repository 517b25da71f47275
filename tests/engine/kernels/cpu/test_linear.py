"""The CPU's own products with weights, against sums in fp64."""

from __future__ import annotations

from weakref import ref

import pytest
import torch

from tests.engine.kernels.cpu.dtypes import DTYPES
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.backends import choose_linear
from tidemill.engine.kernels.cpu import linear
from tidemill.engine.kernels.cpu.linear import PackedLinear
from tidemill.engine.kernels.cpu.linear_panels import ROWS, WIDTH
from tidemill.engine.kernels.elementwise import Activation, Gate
from tidemill.engine.kernels.linear import Epilogue

GATES = [Gate(), Gate("gelu_tanh"), Gate("gelu"), Gate(alpha=1.702, limit=1.5, beta=1.0)]
# Outputs and inputs: one panel, less, several and a part, and more than a block's rows read.
SHAPES = [(WIDTH, 64), (1, 2), (3, 66), (WIDTH + 1, 40), (1000, 512), (2 * WIDTH, 6000)]


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers, rounded to a dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(weight: torch.Tensor, bias: torch.Tensor | None, gate: Epilogue = None) -> PackedLinear:
    """Return the kernel's product, which must exist."""
    product = linear.prepare(weight, bias, gate)
    assert product is not None
    return product


def close(got: torch.Tensor, expected: torch.Tensor, inputs: int) -> None:
    """Compare a result with the exact one, up to its rounding and that of its sums."""
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product_for_any_shape_and_number_of_rows(
    dtype: torch.dtype, outputs: int, inputs: int, *, is_biased: bool
) -> None:
    """None, fewer and more than a tile has, and more than a block."""
    weight = random(outputs, inputs, seed=0, dtype=dtype)
    bias = random(outputs, seed=1, dtype=dtype) if is_biased else None
    product = made(weight, bias)
    for rows in (0, 1, 2, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS + 3):
        x = random(rows, inputs, seed=rows, dtype=dtype)
        exact = x.double() @ weight.double().T
        got = product(x)
        assert got.dtype == dtype
        close(got, exact if bias is None else exact + bias.double(), inputs)
    token_ids = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(product.embed(token_ids), weight[token_ids])


@pytest.mark.parametrize("has_own_head", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_head_and_its_embedding_share_one_memory(
    dtype: torch.dtype, *, has_own_head: bool
) -> None:
    """The stored embedding is freed: its rows are read from the panels."""
    factory = choose_linear(reference, torch.device("cpu"))
    weight = random(100, 64, seed=0, dtype=dtype)
    expected, kept = weight[:7].clone(), ref(weight)
    embed, *_ = factory.make_head(weight, weight.clone() if has_own_head else None)
    del weight
    assert (kept() is not None) == has_own_head
    assert torch.equal(embed(torch.arange(7)), expected)


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize("outputs", [16, 1, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_joined_as_by_the_reference(
    dtype: torch.dtype, outputs: int, gate: Gate, *, is_biased: bool
) -> None:
    """The sums themselves, which were never rounded."""
    weight = random(2 * outputs, 40, seed=2, dtype=dtype) / 4
    bias = random(2 * outputs, seed=3, dtype=dtype) if is_biased else None
    product = made(weight, bias, gate)
    for rows in (1, ROWS + 1):
        x = random(rows, 40, seed=rows, dtype=dtype)
        both = x.double() @ weight.double().T
        both = both if bias is None else both + bias.double()
        close(product(x), reference.act_and_mul(both.float(), gate).double(), 40)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_sigmoid", "gelu"])
@pytest.mark.parametrize("outputs", [WIDTH, 50, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_bent_as_by_the_reference(
    dtype: torch.dtype, outputs: int, activation: Activation
) -> None:
    """Far out, too, where the curve is 0 or the number itself."""
    weight = random(outputs, 40, seed=2, dtype=dtype)
    bias = random(outputs, seed=3, dtype=dtype)
    product = made(weight, bias, activation)
    for rows in (1, ROWS + 1):
        x = random(rows, 40, seed=rows, dtype=dtype)
        straight = x.double() @ weight.double().T + bias.double()
        close(product(x), reference.activate(straight, activation), 40)


@pytest.mark.parametrize("gate", [None, Gate(), "gelu"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_comes_to_the_same_alone_and_in_company(dtype: torch.dtype, gate: Epilogue) -> None:
    """Bit for bit, so that no request changes another."""
    product = made(random(96, 320, seed=4, dtype=dtype), None, gate)
    x = random(5 * ROWS + 3, 320, seed=5, dtype=dtype)
    together = product(x)
    for rows in range(1, 2 * ROWS):
        assert torch.equal(product(x[7 : 7 + rows]), together[7 : 7 + rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("gate", [None, *GATES, "gelu"], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_numbers_stay_in_their_row(
    dtype: torch.dtype, gate: Epilogue, value: float
) -> None:
    """NaN and infinity appear there: such a row becomes an error, and no other does."""
    # Inputs of which a pair of bf16 ends a row: the next row's must not be read with it.
    product = made(random(70, 38, seed=6, dtype=dtype), None, gate)
    x = random(3, 38, seed=7, dtype=dtype)
    x[1, 0] = x[1, -1] = value
    got = product(x)
    assert not got[1].isfinite().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_have_a_stride(dtype: torch.dtype) -> None:
    """A slice of a wider tensor is as good as a copy of it."""
    product = made(random(40, 24, seed=8, dtype=dtype), None)
    x = random(9, 64, seed=9, dtype=dtype)[:, 16:40]
    assert torch.equal(product(x), product(x.clone()))


def test_weights_without_whole_words_are_left_to_other_kernels() -> None:
    """An odd number of bf16 ends within a word, and fp16 numbers have no words."""
    assert linear.prepare(torch.zeros(8, 7, dtype=torch.bfloat16), None, None) is None
    assert linear.prepare(torch.zeros(8, 8, dtype=torch.float16), None, None) is None
    assert linear.prepare(torch.zeros(8, 0), None, None) is None


def test_where_tiles_are_instructions_bfloat16_is_left_to_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AMX multiplies several times as fast as vectors do."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not linear.supports(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_a_weight_is_kept(dtype: torch.dtype) -> None:
    """Otherwise a model would be in memory twice."""
    weight = random(40, 24, seed=10, dtype=dtype)
    x = random(2, 24, seed=11, dtype=dtype)
    product = made(weight, None)
    before = product(x)
    weight.zero_()
    assert torch.equal(product(x), before)
