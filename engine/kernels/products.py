"""Products with weights: `x [T, I]` → `[T, O]`, prepared once for the device that they run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]

# Relative to the largest number: what two orders of summation may differ by.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
CHECKED_ROWS = 5


class Products:
    """Makes products of one model's weights.

    Of each shape it looks once whether the prepared product gives what torch's does.
    """

    def __init__(self) -> None:
        self._verdicts: dict[object, bool] = {}

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Return x · weightᵀ + bias, for `weight [O, I]` and `bias [O]`."""
        plain = partial(functional.linear, weight=weight, bias=bias)
        if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
            return plain
        kind = (weight.shape, weight.dtype, bias is None)
        if self._verdicts.get(kind) is False:
            return plain
        packed = _packed(weight, bias)
        if kind not in self._verdicts:
            self._verdicts[kind] = packed is not None and _agree(plain, packed, weight)
        return packed if packed is not None and self._verdicts[kind] else plain


def _packed(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return the product over oneDNN's own order of a weight, which reads half again as fast.

    torch tells these operations to its compiler only; where they are gone there is no such product.
    """
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001
        multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        reordered = reorder(weight)
    except (AttributeError, RuntimeError, TypeError):
        return None

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, reordered, bias, "none", [], "")
        return result

    return product


def _agree(plain: Product, packed: Product, weight: Tensor) -> bool:
    """Say whether both give the same for random rows, as many as no other call has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CHECKED_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        expected, got = plain(x).float(), packed(x).float()
    except RuntimeError:
        return False
    bound = TOLERANCE[weight.dtype] * expected.abs().amax()
    return bool((expected - got).abs().amax() <= bound)
