"""The adapter of each row of a product, and its low-rank term in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tidemill.engine.kernels import elementwise
from tidemill.engine.kernels.adapters import AdapterMapping, AdapterWeights, LinearAdapters
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.linear import Linear, LinearFactory

ADAPTERS = [
    AdapterWeights(torch.ones(2, 4), torch.ones(6, 2)),
    None,
    AdapterWeights(-torch.ones(1, 4), torch.ones(6, 1)),
]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_tiles_are_even_cuts_of_runs_of_one_owner(mapping: list[int], at_most: int) -> None:
    """Every row is in one, in order, and none is longer than it may be."""
    adapter_mapping = AdapterMapping()
    adapter_mapping.update(np.array(mapping, np.int32))
    assert (len(adapter_mapping), adapter_mapping.has_any) == (len(mapping), any(mapping))
    tiles = adapter_mapping.tiles(at_most).tolist() if mapping else []
    rows = [(row, owner) for begin, end, owner in tiles for row in range(begin, end)]
    assert rows == list(enumerate(mapping))
    assert all(0 < end - begin <= at_most for begin, end, _ in tiles)


@pytest.mark.parametrize("gate", [None, Gate()], ids=["plain", "gated"])
def test_without_a_kernel_torch_adds_the_adapters_terms(gate: Gate | None) -> None:
    """Other rows are unchanged."""
    mapping = AdapterMapping()
    products = LinearFactory(elementwise, [])
    assert products.needs_torch
    weight = torch.arange(24.0).view(6, 4)
    product = products.make_adapted(weight, None, gate, LinearAdapters(ADAPTERS, mapping))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    mapping.update(np.array([0, 1, 2, 3, 1]))
    shares = torch.tensor([0.0, 2.0, 0.0, -1.0, 2.0])
    expected = x @ weight.T + (shares * x.sum(dim=1))[:, None]
    if gate is not None:
        expected = elementwise.act_and_mul(expected, gate)
    torch.testing.assert_close(product(x), expected)


def test_a_kernel_that_gives_something_else_is_not_taken() -> None:
    """Each kind of product is checked once; torch replaces it, and that is reported."""
    looked_at: list[int] = []

    def wrong(weight: Tensor, _bias: object, _gate: object, _adapting: object) -> Linear:
        looked_at.append(len(weight))
        return lambda x: x @ weight.T

    mapping = AdapterMapping()
    products = LinearFactory(elementwise, [lambda *_: None], wrong)
    weight = torch.eye(6, 4)
    for _ in range(2):
        product = products.make_adapted(weight, None, None, LinearAdapters(ADAPTERS, mapping))
    assert looked_at == [6]
    assert products.needs_torch
    mapping.update(np.array([1]))
    torch.testing.assert_close(product(torch.ones(1, 4)), weight.sum(dim=1)[None] + 8)
