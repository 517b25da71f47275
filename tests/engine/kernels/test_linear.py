"""Products with weights, prepared or plain."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tidemill.engine.kernels import elementwise, linear
from tidemill.engine.kernels.backends import choose_linear
from tidemill.engine.kernels.cpu.linear import supports
from tidemill.engine.kernels.elementwise import Gate
from tidemill.engine.kernels.linear import Linear, LinearFactory, prepack
from tidemill.engine.kernels.quantised import quantise_fp8

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def maker(product: Any) -> str:
    """Return the module of a product: torch's own are partial functions."""
    return str(product.__module__)


@pytest.mark.parametrize("ways", [[], [prepack], None], ids=["torch", "oneDNN", "device"])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("is_biased", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_product_of_torch(
    dtype: torch.dtype, rows: int, ways: list[Any] | None, *, is_biased: bool
) -> None:
    """Any number of rows agrees up to the order of sums, with halves joined or not."""
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(72, 40, generator=generator), torch.randn(72, generator=generator)
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    given = bias.to(dtype) if is_biased else None
    makes = choose_linear(elementwise, CPU) if ways is None else LinearFactory(elementwise, ways)
    expected = torch.nn.functional.linear(
        x.double(), weight.to(dtype).double(), None if given is None else given.double()
    )
    tolerance = TOLERANCE[dtype]
    got = makes.make(weight.to(dtype), given)(x)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=20 * tolerance)
    got = makes.make_gated(weight.to(dtype), given, Gate())(x)
    joined = elementwise.act_and_mul(expected, Gate())
    torch.testing.assert_close(got.double(), joined, rtol=3 * tolerance, atol=60 * tolerance)
    got = makes.make_activated(weight.to(dtype), given, "gelu")(x)
    bent = elementwise.activate(expected, "gelu")
    torch.testing.assert_close(got.double(), bent, rtol=tolerance, atol=20 * tolerance)


def never(*_: object) -> None:
    """Prepare no layer."""


def test_the_rows_of_a_head_can_be_looked_up() -> None:
    """Torch's, oneDNN's and quantised heads have the rows, tied or not, in tiles or not."""
    embedding, head = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)).unbind()
    some, quantised = torch.tensor([7, 0, 49]), quantise_fp8(head)
    makes, packs = LinearFactory(elementwise, []), LinearFactory(elementwise, [prepack])
    tiles = LinearFactory(elementwise, [never, prepack], has_fixed_tiles=True)
    plain_tiles = LinearFactory(elementwise, [never], has_fixed_tiles=True)
    for factory, own, expected in (
        (makes, None, embedding),
        (makes, head, head),
        (makes, quantised, quantised.dequantised()),
        (packs, None, embedding),
        (packs, head, head),
        (tiles, head, head),
        (plain_tiles, head, head),
    ):
        *_, rows = factory.make_head(embedding, own)
        assert rows is not None
        assert torch.equal(rows(some), expected[some])


def test_a_kernel_with_different_results_is_not_used() -> None:
    """oneDNN's operations are private to torch and may change; a kernel may be wrong."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

    def off_by_a_little(weight: torch.Tensor, _bias: object, gate: Gate | None) -> Linear:
        def product(x: torch.Tensor) -> torch.Tensor:
            both = torch.nn.functional.linear(x, weight) * 1.01
            return both if gate is None else elementwise.act_and_mul(both, gate)

        return product

    makes = LinearFactory(elementwise, [off_by_a_little])
    x = torch.ones(3, 16)
    plain = torch.nn.functional.linear(x, weight)
    for _ in range(2):
        assert torch.equal(makes.make(weight)(x), plain)
        gate = Gate()
        assert torch.equal(
            makes.make_gated(weight, None, gate)(x), elementwise.act_and_mul(plain, gate)
        )
    assert (
        maker(LinearFactory(elementwise, [off_by_a_little, prepack]).make(weight))
        == linear.__name__
    )


def test_without_those_operations_there_is_still_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another release of torch may call them something else."""
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight = torch.eye(8)
    product = LinearFactory(elementwise, [prepack]).make(weight)
    assert torch.equal(product(torch.ones(2, 8)), torch.ones(2, 8))


def test_they_are_used_on_this_release_of_torch() -> None:
    """Otherwise every step would read its weights a third slower without notice."""
    assert maker(LinearFactory(elementwise, [prepack]).make(torch.randn(64, 64))) == linear.__name__


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_own_kernel_comes_first_where_it_serves(dtype: torch.dtype) -> None:
    """A device of another kind has only torch."""
    weight = torch.randn(64, 64).to(dtype)
    makes = choose_linear(elementwise, CPU)
    for product in (makes.make(weight), makes.make_gated(weight, None, Gate())):
        assert (maker(product) == "tidemill.engine.kernels.cpu.linear") == supports(dtype)
    elsewhere = choose_linear(elementwise, torch.device("meta"))
    assert maker(elsewhere.make(weight)) == "functools"


def test_it_is_known_whether_any_is_torchs_own() -> None:
    """The threads that a model needs depend on it."""
    weight = torch.randn(32, 16)

    def never(_weight: torch.Tensor, _bias: object, _gate: object) -> None:
        return None

    ours = LinearFactory(elementwise, [lambda *given: partial(joined, *given)])
    ours.make(weight)
    ours.make_gated(weight, None, Gate())
    assert not ours.needs_torch
    later = LinearFactory(elementwise, [never, prepack])
    later.make(weight)
    assert later.needs_torch
    none = LinearFactory(elementwise, [never])
    none.make_gated(weight, None, Gate())
    assert none.needs_torch


def joined(weight: torch.Tensor, bias: Any, gate: Gate | None, x: torch.Tensor) -> torch.Tensor:
    """Return torch's product, joined if there is a gate."""
    both = torch.nn.functional.linear(x, weight, bias)
    return both if gate is None else elementwise.act_and_mul(both, gate)
