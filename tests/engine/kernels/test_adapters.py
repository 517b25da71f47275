"""Whose the rows of a product are, and what adapters add to them in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import blocks
from engine.kernels.adapters import Adapting, LowRank, Owners
from engine.kernels.blocks import Gate
from engine.kernels.products import Product, Products

ADAPTERS = [
    LowRank(torch.ones(2, 4), torch.ones(6, 2)),
    None,
    LowRank(-torch.ones(1, 4), torch.ones(6, 1)),
]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_tiles_are_even_cuts_of_runs_of_one_owner(owners: list[int], at_most: int) -> None:
    """Every row is in one, in order, and none is longer than it may be."""
    told = Owners()
    told.tell(np.array(owners, np.int32))
    assert (len(told), told.has_any) == (len(owners), any(owners))
    tiles = told.tiles(at_most).tolist() if owners else []
    rows = [(row, owner) for begin, end, owner in tiles for row in range(begin, end)]
    assert rows == list(enumerate(owners))
    assert all(0 < end - begin <= at_most for begin, end, _ in tiles)


@pytest.mark.parametrize("gate", [None, Gate()], ids=["plain", "gated"])
def test_without_a_kernel_torch_adds_what_adapters_make(gate: Gate | None) -> None:
    """To their rows alone."""
    owners = Owners()
    products = Products(blocks, [])
    assert products.needs_torch
    weight = torch.arange(24.0).view(6, 4)
    product = products.make_adapted(weight, None, gate, Adapting(ADAPTERS, owners))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    owners.tell(np.array([0, 1, 2, 3, 1]))
    shares = torch.tensor([0.0, 2.0, 0.0, -1.0, 2.0])
    expected = x @ weight.T + (shares * x.sum(dim=1))[:, None]
    if gate is not None:
        expected = blocks.gated(expected, gate)
    torch.testing.assert_close(product(x), expected)


def test_a_kernel_that_gives_something_else_is_not_taken() -> None:
    """Each kind of product is looked at once; torch stands in, and says that it does."""
    looked_at: list[int] = []

    def wrong(weight: Tensor, _bias: object, _gate: object, _adapting: object) -> Product:
        looked_at.append(len(weight))
        return lambda x: x @ weight.T

    owners = Owners()
    products = Products(blocks, [lambda *_: None], wrong)
    weight = torch.eye(6, 4)
    for _ in range(2):
        product = products.make_adapted(weight, None, None, Adapting(ADAPTERS, owners))
    assert looked_at == [6]
    assert products.needs_torch
    owners.tell(np.array([1]))
    torch.testing.assert_close(product(torch.ones(1, 4)), weight.sum(dim=1)[None] + 8)
