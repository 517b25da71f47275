"""Products with weights, prepared or plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels import products
from engine.kernels.products import Products

HALVES = [torch.float32, torch.bfloat16, torch.float16]


def is_packed(product: Any) -> bool:
    """Say whether a product is one over oneDNN's order."""
    return getattr(product, "__name__", "") == "product"


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_it_is_the_product_of_torch(dtype: torch.dtype, rows: int, *, is_biased: bool) -> None:
    """For any number of rows, but for the order of sums."""
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(72, 40, generator=generator), torch.randn(72, generator=generator)
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    given = bias.to(dtype) if is_biased else None
    got = Products().make(weight.to(dtype), given)(x)
    expected = torch.nn.functional.linear(
        x.double(), weight.to(dtype).double(), None if given is None else given.double()
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=20 * tolerance)


def test_what_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """These operations are torch's own affair, and may change."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

    def off_by_a_little(weight: torch.Tensor, _bias: object) -> products.Product:
        return lambda x: torch.nn.functional.linear(x, weight) * 1.01

    monkeypatch.setattr(products, "_packed", off_by_a_little)
    makes = Products()
    x = torch.ones(3, 16)
    for _ in range(2):
        assert torch.equal(makes.make(weight)(x), torch.nn.functional.linear(x, weight))


def test_without_those_operations_there_is_still_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release of torch may call them something else."""
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight = torch.eye(8)
    assert torch.equal(Products().make(weight)(torch.ones(2, 8)), torch.ones(2, 8))


def test_they_are_used_on_this_release_of_torch() -> None:
    """Else every step would read its weights a third slower, and nobody would know."""
    assert is_packed(Products().make(torch.randn(64, 64)))
