"""The CPU's products through adapters, against sums in fp64 and against themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.engine.kernels.cpu.dtypes import DTYPES
from tidemill.engine.kernels import elementwise as reference
from tidemill.engine.kernels.adapters import AdapterMapping, AdapterWeights, LinearAdapters
from tidemill.engine.kernels.cpu import linear
from tidemill.engine.kernels.cpu.adapters import prepare_adapted
from tidemill.engine.kernels.cpu.linear_panels import ROWS, WIDTH
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.linear import Linear

# Odd, none, more than a panel has columns, even.
RANKS = (3, None, WIDTH + 2, 16)


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers, rounded to a dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(
    outputs: int, inputs: int, dtype: torch.dtype, gate: Gate | None
) -> tuple[Linear, torch.Tensor, torch.Tensor, LinearAdapters]:
    """Return the kernel's product, and its weights."""
    weight = random(outputs, inputs, seed=0, dtype=dtype) / inputs**0.5
    bias = random(outputs, seed=1, dtype=dtype)
    adapters = [
        None
        if rank is None
        else AdapterWeights(
            random(rank, inputs, seed=rank, dtype=dtype) / inputs**0.5,
            random(outputs, rank, seed=-rank, dtype=dtype),
        )
        for rank in RANKS
    ]
    adapting = LinearAdapters(adapters, AdapterMapping())
    product = prepare_adapted(weight, bias, gate, adapting)
    assert product is not None
    return product, weight, bias, adapting


def exact(
    x: torch.Tensor,
    mapping: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    adapting: LinearAdapters,
) -> torch.Tensor:
    """Return the product in fp64, except for the one rounding of the adapters' input."""
    out = x.double() @ weight.double().T + bias.double()
    for row, owner in enumerate(mapping):
        if owner and (own := adapting.adapters[owner - 1]):
            between = (x[row].double() @ own.down.double().T).to(x.dtype)
            out[row] += between.double() @ own.up.double().T
    return out


@pytest.mark.parametrize("gate", [None, Gate(), Gate("gelu_tanh")], ids=["plain", "silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(2 * WIDTH, 64), (6, 66), (600, 512)])
def test_each_row_goes_through_its_own_adapter(
    dtype: torch.dtype, outputs: int, inputs: int, gate: Gate | None
) -> None:
    """Rows of adapters and of the model itself are in runs or alternate, beyond one tile."""
    product, weight, bias, adapting = made(outputs, inputs, dtype, gate)
    for mapping in (
        [1],
        [0, 1, 2, 3, 4],
        [3] * (2 * ROWS + 5) + [0] * 3,
        [0] * ROWS + [2] * 4 + [4] * (ROWS + 1) + [1] * 2,
        [4, 0] * ROWS,
        [],
        [0] * 7,
    ):
        adapting.mapping.update(np.array(mapping, np.int32))
        x = random(len(mapping), inputs, seed=len(mapping), dtype=dtype)
        expected = exact(x, mapping, weight, bias, adapting)
        if gate is not None:
            expected = reference.act_and_mul(expected, gate)
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        # What an adapter reads is rounded after sums in another order.
        slack = 1e-3 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(product(x).double(), expected, rtol=tolerance, atol=slack)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    """Bit for bit; and without an adapter to what it comes to in a model that has none."""
    product, weight, bias, adapting = made(200, 96, dtype, Gate())
    mapping = np.array([0, 3, 1, 1, 4, 2, 0, 3] * 5)
    x = random(len(mapping), 96, seed=5, dtype=dtype)
    adapting.mapping.update(mapping)
    together = product(x)
    for row in range(8):
        adapting.mapping.update(mapping[row : row + 1])
        assert torch.equal(product(x[row : row + 1])[0], together[row])
    plain = linear.prepare(weight, bias, Gate())
    assert plain is not None
    has_none = (mapping == 0) | (mapping == 2)
    assert torch.equal(plain(x)[has_none], together[has_none])


def test_no_kernel_takes_halves() -> None:
    """Unsupported dtypes are reported."""
    weight = torch.zeros(4, 4, dtype=torch.float16)
    assert prepare_adapted(weight, None, None, LinearAdapters([None], AdapterMapping())) is None
