"""Products with weights: `x [T, I]` → `[T, O]`, prepared once for the device that they run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.adapters import Adapting, add_shares
from engine.kernels.blocks import Blocks, Curve, Gate, curved
from engine.kernels.quantised import Matrix, Quantised, as_tensor

Product = Callable[[Tensor], Tensor]
# What becomes of a product's numbers: a gate joins its halves, a curve bends each.
End = Gate | Curve | None
# What makes a product through adapters of a weight, a bias and a gate; None where it cannot.
PreparesAdapted = Callable[[Tensor, Tensor | None, Gate | None, Adapting], Product | None]
# What makes a product of a quantised weight and a bias; None where it cannot.
PreparesQuantised = Callable[[Quantised, Tensor | None], Product | None]
# What makes a product of a weight, a bias and an end; None where it cannot.
Prepares = Callable[[Tensor, Tensor | None, End], Product | None]

# Relative to the largest number: what two orders of summation may differ by.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# What rows that become fp8, too, may lose.
TOLERANCE_OF_FP8 = 0.1
CHECKED_ROWS = 5


class Products:
    """Makes products of one model's weights, by the first of some ways that gives what torch does.

    Each way is looked at once for each shape.
    """

    def __init__(
        self,
        blocks: Blocks,
        ways: Sequence[Prepares],
        adapted: PreparesAdapted | None = None,
        quantised: Sequence[PreparesQuantised] = (),
    ) -> None:
        self._blocks = blocks
        self._ways = ways
        self._adapted = adapted
        self._quantised = quantised
        self._verdicts: dict[object, bool] = {}
        self.needs_torch = not ways  # for any of them: its own function, or one of a later way

    def make(self, weight: Matrix, bias: Tensor | None = None) -> Product:
        """Return x · weightᵀ + bias, for `weight [O, I]` and `bias [O]`."""
        if isinstance(weight, Quantised):
            return self._of_quantised(weight, bias)
        plain = partial(functional.linear, weight=weight, bias=bias)
        return self._prepared(weight, bias, None, plain) or plain

    def make_gated(self, weight: Matrix, bias: Tensor | None, gate: Gate) -> Product:
        """Return the halves of x · weightᵀ + bias joined: `weight [2·O, I]`, `bias [2·O]`."""

        def plain(x: Tensor) -> Tensor:
            return self._blocks.gated(functional.linear(x, as_tensor(weight), bias), gate)

        prepared = self._prepared(weight, bias, gate, plain)
        if prepared is not None:
            return prepared
        both, gated = self.make(weight, bias), self._blocks.gated
        return lambda x: gated(both(x), gate)

    def make_adapted(
        self, weight: Matrix, bias: Tensor | None, gate: Gate | None, adapting: Adapting
    ) -> Product:
        """Return what `make`, or with a gate `make_gated`, does, through each row's adapter."""
        prepared = self._prepared_adapted(weight, bias, gate, adapting)
        if prepared is not None:
            return prepared
        self.needs_torch = True
        return self._added(self.make(weight, bias), gate, adapting)

    def make_curved(self, weight: Matrix, bias: Tensor | None, curve: Curve) -> Product:
        """Return a curve of x · weightᵀ + bias."""

        def plain(x: Tensor) -> Tensor:
            return curved(functional.linear(x, as_tensor(weight), bias), curve)

        prepared = self._prepared(weight, bias, curve, plain)
        if prepared is not None:
            return prepared
        straight = self.make(weight, bias)
        return lambda x: curved(straight(x), curve)

    def _of_quantised(self, weight: Quantised, bias: Tensor | None) -> Product:
        def plain(x: Tensor) -> Tensor:
            return functional.linear(x, weight.dequantised(), bias)

        for way in self._quantised:
            kind = (way, weight.shape, weight.kind, bias is None)
            if self._verdicts.get(kind) is False:
                continue
            product = way(weight, bias)
            if kind not in self._verdicts:
                bound = TOLERANCE_OF_FP8 if weight.zeros is None else TOLERANCE[weight.dtype]
                self._verdicts[kind] = product is not None and _agree(
                    plain, product, weight, bound=bound
                )
            if product is not None and self._verdicts[kind]:
                return product
        self.needs_torch = True
        return plain

    def _added(self, whole: Product, gate: Gate | None, adapting: Adapting) -> Product:
        """Return a product to which the shares of adapters are added."""

        def added(x: Tensor) -> Tensor:
            both = add_shares(whole(x), x, adapting)
            return both if gate is None else self._blocks.gated(both, gate)

        return added

    def _prepared_adapted(
        self, weight: Matrix, bias: Tensor | None, gate: Gate | None, adapting: Adapting
    ) -> Product | None:
        if self._adapted is None or isinstance(weight, Quantised):
            return None
        ranks = tuple(None if own is None else len(own.down) for own in adapting.adapters)
        kind = (self._adapted, weight.shape, weight.dtype, bias is None, gate, ranks)
        if self._verdicts.get(kind) is False:
            return None
        product = self._adapted(weight, bias, gate, adapting)
        if kind not in self._verdicts:
            plain = partial(functional.linear, weight=weight, bias=bias)
            adapting.owners.tell(np.arange(CHECKED_ROWS * (len(ranks) + 1)) % (len(ranks) + 1))
            self._verdicts[kind] = product is not None and _agree(
                self._added(plain, gate, adapting), product, weight, len(ranks) + 1
            )
        return product if self._verdicts[kind] else None

    def _prepared(
        self, weight: Matrix, bias: Tensor | None, end: End, plain: Product
    ) -> Product | None:
        if isinstance(weight, Quantised):
            return None  # its products have no ends
        for place, way in enumerate(self._ways):
            kind = (way, weight.shape, weight.dtype, bias is None, end)
            if self._verdicts.get(kind) is False:
                continue
            product = way(weight, bias, end)
            if kind not in self._verdicts:
                self._verdicts[kind] = product is not None and _agree(plain, product, weight)
            if self._verdicts[kind]:
                self.needs_torch |= place > 0
                return product
        self.needs_torch |= not isinstance(end, Gate)
        return None


def prepack(weight: Tensor, bias: Tensor | None, end: End) -> Product | None:
    """Return the product over oneDNN's own order of a weight, which reads half again as fast.

    torch tells these operations to its compiler only; where they are gone there is no such product.
    """
    if end is not None or weight.dtype not in TOLERANCE:
        return None
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


def _agree(
    plain: Product,
    prepared: Product,
    weight: Matrix,
    times: int = 1,
    bound: float | None = None,
) -> bool:
    """Say whether both give the same for random rows, as many as no other call has.

    Where there is no memory, both are only run.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(times * CHECKED_ROWS, weight.shape[1], generator=generator)
    x = x.to(weight.device, weight.dtype)
    try:
        expected, got = plain(x).float(), prepared(x).float()
    except RuntimeError:
        return False
    if x.is_meta:
        return expected.shape == got.shape
    most = (TOLERANCE[weight.dtype] if bound is None else bound) * expected.abs().amax()
    return bool((expected - got).abs().amax() <= most)
