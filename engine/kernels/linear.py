"""Linear layers: `x [T, I]` → `[T, O]`, their weights prepacked once for the device.

An epilogue (an activation or a gate) is fused into the layer if the device's kernel supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from inspect import unwrap
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .adapters import LinearAdapters, add_adapters
from .elementwise import Activation, ElementwiseOps, Gate, Norm, activate
from .quantised import FP8, Fp8Rows, Matrix, Quantised, as_tensor

Linear = Callable[[Tensor], Tensor]
# Looks up the rows `[T, I]` of a weight by token ids `[T]`.
Embedding = Callable[[Tensor], Tensor]
# Adds `x [T, I]`, None being 0, to a `residual [T, I]` in place, and returns a layer's output of
# the norm of the sum.
NormedLinear = Callable[[Tensor | None, Tensor], Tensor]
# Applied to a layer's outputs: a gate joins their halves, an activation maps each number.
Epilogue = Gate | Activation | None
# Prepares a layer with adapters from weight, bias and gate; returns None if it cannot.
PrepareAdapted = Callable[[Tensor, Tensor | None, Gate | None, LinearAdapters], Linear | None]
# Prepares a layer from a quantised weight and a bias; returns None if it cannot.
PrepareQuantised = Callable[[Quantised, Tensor | None], Linear | None]
# The same with an epilogue.
PrepareFused = Callable[[Quantised, Tensor | None, Epilogue], Linear | None]
# Prepares a layer from a weight, a bias and an epilogue; returns None if it cannot.
PrepareLinear = Callable[[Tensor, Tensor | None, Epilogue], Linear | None]

# Greatest difference between two orders of summation, relative to the largest number.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# The same if activations are quantised to fp8, too.
FP8_TOLERANCE = 0.1
INT8_TOLERANCE = 3e-2
_BOUNDS = {FP8: FP8_TOLERANCE, torch.int8: INT8_TOLERANCE}
CHECKED_ROWS = 5
# Rows of a product that torch or oneDNN computes in a batch-invariant model.
TILE_ROWS = 64


class Fp8Ops(Protocol):
    """Quantisation of activations to fp8, alone or in the pass that computes them.

    Groups of inputs share a scale: a power of two from 128 on, or a row. The result of two fused
    operations is bit-identical to that of the two in turn.
    """

    def quantise_fp8(self, x: Tensor, group: int) -> Fp8Rows:
        """Quantise `x [T, I]`; see `quantise_rows_fp8`."""

    def add_rms_norm_fp8(
        self, x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, group: int
    ) -> Fp8Rows:
        """Quantise `ElementwiseOps.add_rms_norm`, or without x `[T, H]` `rms_norm` of residual."""

    def act_and_mul_fp8(self, both: Tensor, gate: Gate, group: int) -> Fp8Rows:
        """Quantise `ElementwiseOps.act_and_mul` of `both [T, 2·I]`."""


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """Linear layer of fp8 activations, which the norm or the gate before it may quantise."""

    multiply: Callable[[Fp8Rows], Tensor]
    group: int
    ops: Fp8Ops

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for plain `x [T, I]`."""
        return self.multiply(self.ops.quantise_fp8(x, self.group))

    def normed(self, weight: Tensor, eps: float) -> NormedLinear:
        """Return the layer after an RMS norm."""
        norm, group = self.ops.add_rms_norm_fp8, self.group
        return lambda x, residual: self.multiply(norm(x, residual, weight, eps, group))

    def gated(self, both: Tensor, gate: Gate) -> Tensor:
        """Return the output for the gated activation of `both [T, 2·I]`."""
        return self.multiply(self.ops.act_and_mul_fp8(both, gate, self.group))


class LinearFactory:
    """Makes one model's linear layers by the first candidate kernel that agrees with torch.

    Each candidate is checked against torch once per shape. With `has_fixed_tiles` torch's function
    and all candidates after the first multiply tiles of a fixed number of rows: they choose the
    order of their sums by that number.
    """

    def __init__(
        self,
        ops: ElementwiseOps,
        ways: Sequence[PrepareLinear],
        adapted: PrepareAdapted | None = None,
        quantised: Sequence[PrepareQuantised] = (),
        fused: Sequence[PrepareFused] = (),
        *,
        has_fixed_tiles: bool = False,
    ) -> None:
        self._tiled: Callable[[Linear], Linear] = in_tiles if has_fixed_tiles else lambda x: x
        self._ops = ops
        self._ways = ways
        self._adapted = adapted
        self._quantised: list[PrepareFused] = [
            *fused,
            *(partial(_without_epilogue, way) for way in quantised),
        ]
        self._verdicts: dict[object, bool] = {}
        self.needs_torch = not ways  # whether any layer runs torch's function or a later candidate

    def make(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        """Return x · weightᵀ + bias, for `weight [O, I]` and `bias [O]`."""
        if isinstance(weight, Quantised):
            return self._prepare_quantised(weight, bias, None) or self._dequantised(weight, bias)
        plain = partial(functional.linear, weight=weight, bias=bias)
        return self._prepare(weight, bias, None, plain) or self._tiled(plain)

    def make_head(
        self, embedding: Tensor, head: Matrix | None, bias: Tensor | None = None
    ) -> tuple[Embedding, Linear, Embedding | None]:
        """Return an embedding, its head, and a lookup of the head's rows of weights.

        A tied head shares the embedding's memory. Of another one in oneDNN's layout, the first
        lookup makes a plain copy.
        """
        linear = self.make(embedding if head is None else head, bias)
        product = unwrap(linear)
        rows: Embedding | None = getattr(product, "embed", None)
        embed: Embedding = partial(functional.embedding, weight=embedding)
        if head is None:
            embed = rows = rows or embed
        elif isinstance(head, Quantised):
            rows = head.rows
        elif isinstance(product, partial):
            rows = partial(functional.embedding, weight=head)
        elif isinstance(product, ReorderedLinear):
            rows = product.rows
        return embed, linear, rows

    def make_gated(self, weight: Matrix, bias: Tensor | None, gate: Gate) -> Linear:
        """Return x · weightᵀ + bias with its halves gated: `weight [2·O, I]`, `bias [2·O]`."""

        def plain(x: Tensor) -> Tensor:
            return self._ops.act_and_mul(functional.linear(x, as_tensor(weight), bias), gate)

        prepared = self._prepare(weight, bias, gate, plain)
        if prepared is not None:
            return prepared
        both, gated = self.make(weight, bias), self._ops.act_and_mul
        return lambda x: gated(both(x), gate)

    def make_normed(self, layer: Linear, norm: Norm | None) -> NormedLinear:
        """Return a layer, or several, after a norm; without a norm it takes the sum itself."""
        if norm is None:
            return lambda x, residual: layer(residual if x is None else residual.add_(x))
        fuse: Callable[[Tensor, float], NormedLinear] | None = getattr(layer, "normed", None)
        if fuse is not None and norm.bias is None:
            return fuse(norm.weight, norm.eps)
        return lambda x, residual: layer(norm.add(x, residual))

    def make_adapted(
        self, weight: Matrix, bias: Tensor | None, gate: Gate | None, adapters: LinearAdapters
    ) -> Linear:
        """Return the result of `make`, or with a gate of `make_gated`, plus each row's adapter."""
        prepared = self._prepare_adapted(weight, bias, gate, adapters)
        if prepared is not None:
            return prepared
        self.needs_torch = True
        return self._with_adapters(self.make(weight, bias), gate, adapters)

    def make_activated(self, weight: Matrix, bias: Tensor | None, activation: Activation) -> Linear:
        """Return the activation of x · weightᵀ + bias."""

        def plain(x: Tensor) -> Tensor:
            return activate(functional.linear(x, as_tensor(weight), bias), activation)

        prepared = self._prepare(weight, bias, activation, plain)
        if prepared is not None:
            return prepared
        straight = self.make(weight, bias)
        return self._tiled(lambda x: activate(straight(x), activation))

    def agree(self, kernel: Linear, plain: Linear, weight: Quantised, rows: int) -> bool:
        """Return whether a quantised experts' kernel agrees with torch; checked once per shape."""
        kind = (rows, weight.shape, weight.kind)
        if kind not in self._verdicts:
            self._verdicts[kind] = _agree(plain, kernel, weight, rows)
        self.needs_torch |= not self._verdicts[kind]
        return self._verdicts[kind]

    def _dequantised(self, weight: Quantised, bias: Tensor | None) -> Linear:
        """Return a layer that dequantises its weight with each call."""
        self.needs_torch = True
        return self._tiled(lambda x: functional.linear(x, weight.dequantised(), bias))

    def _prepare_quantised(
        self, weight: Quantised, bias: Tensor | None, epilogue: Epilogue
    ) -> Linear | None:
        def plain(x: Tensor) -> Tensor:
            out = functional.linear(x, weight.dequantised(), bias)
            if isinstance(epilogue, Gate):
                return self._ops.act_and_mul(out, epilogue)
            return out if epilogue is None else activate(out, epilogue)

        for way in self._quantised:
            kind = (way, weight.shape, weight.kind, bias is None, epilogue)
            if self._verdicts.get(kind) is False:
                continue
            product = way(weight, bias, epilogue)
            if kind not in self._verdicts:
                self._verdicts[kind] = product is not None and _agree(plain, product, weight)
            if product is not None and self._verdicts[kind]:
                return product
        return None

    def _with_adapters(self, whole: Linear, gate: Gate | None, adapters: LinearAdapters) -> Linear:
        """Return a layer that adds the outputs of its rows' adapters."""

        def added(x: Tensor) -> Tensor:
            both = add_adapters(whole(x), x, adapters)
            return both if gate is None else self._ops.act_and_mul(both, gate)

        return added

    def _prepare_adapted(
        self, weight: Matrix, bias: Tensor | None, gate: Gate | None, adapters: LinearAdapters
    ) -> Linear | None:
        if self._adapted is None or isinstance(weight, Quantised):
            return None
        ranks = tuple(None if own is None else len(own.down) for own in adapters.adapters)
        kind = (self._adapted, weight.shape, weight.dtype, bias is None, gate, ranks)
        if self._verdicts.get(kind) is False:
            return None
        product = self._adapted(weight, bias, gate, adapters)
        if kind not in self._verdicts:
            plain = partial(functional.linear, weight=weight, bias=bias)
            adapters.mapping.update(np.arange(CHECKED_ROWS * (len(ranks) + 1)) % (len(ranks) + 1))
            self._verdicts[kind] = product is not None and _agree(
                self._with_adapters(plain, gate, adapters),
                product,
                weight,
                CHECKED_ROWS * (len(ranks) + 1),
            )
        return product if self._verdicts[kind] else None

    def _prepare(
        self, weight: Matrix, bias: Tensor | None, epilogue: Epilogue, plain: Linear
    ) -> Linear | None:
        if isinstance(weight, Quantised):
            return self._prepare_quantised(weight, bias, epilogue)
        for place, way in enumerate(self._ways):
            kind = (way, weight.shape, weight.dtype, bias is None, epilogue)
            if self._verdicts.get(kind) is False:
                continue
            product = way(weight, bias, epilogue)
            if kind not in self._verdicts:
                self._verdicts[kind] = product is not None and _agree(plain, product, weight)
            if self._verdicts[kind]:
                self.needs_torch |= place > 0
                return product if place == 0 or product is None else self._tiled(product)
        self.needs_torch |= not isinstance(epilogue, Gate)
        return None


def in_tiles(product: Linear) -> Linear:
    """Return a product that computes `TILE_ROWS` rows at a time, zeros if there are fewer."""

    @wraps(product)
    def tiled(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, -len(x) % TILE_ROWS))
        tiles = torch.split(padded, TILE_ROWS)
        return torch.cat([product(tile) for tile in tiles])[: len(x)]

    return tiled


class ReorderedLinear:
    """Linear layer of a weight in oneDNN's own layout."""

    def __init__(
        self, multiply: Callable[..., Tensor], reordered: Tensor, bias: Tensor | None
    ) -> None:
        self._multiply, self._reordered, self._bias = multiply, reordered, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x · weightᵀ + bias."""
        return self._multiply(x, self._reordered, self._bias, "none", [], "")

    @cached_property
    def _plain(self) -> Tensor:
        return self._reordered.to_dense()

    def rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the weight; the first call makes a plain copy of it."""
        return functional.embedding(token_ids, self._plain)


def prepack(weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Linear | None:
    """Prepack a weight in oneDNN's own layout, which reads 1.5 times as fast, and return the layer.

    torch exposes these operations to its compiler only; returns None where they are missing.
    """
    if epilogue is not None or weight.dtype not in TOLERANCE:
        return None
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001
        multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        return ReorderedLinear(multiply, reorder(weight), bias)
    except (AttributeError, RuntimeError, TypeError):
        return None


def _without_epilogue(
    way: PrepareQuantised, weight: Quantised, bias: Tensor | None, epilogue: Epilogue
) -> Linear | None:
    """Prepare a layer of a quantised weight with a kernel that has no epilogue."""
    return way(weight, bias) if epilogue is None else None


def _agree(plain: Linear, prepared: Linear, weight: Matrix, rows: int = CHECKED_ROWS) -> bool:
    """Compare both on random rows; the number of rows is one that no other call has.

    On the meta device only the shapes are compared.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.shape[-1], generator=generator)
    x = x.to(weight.device, weight.dtype)
    try:
        expected, got = plain(x).float(), prepared(x).float()
    except (RuntimeError, ValueError):  # torch raises either for an unsupported product
        return False
    if x.is_meta:
        return expected.shape == got.shape
    numbers = weight.numbers.dtype if isinstance(weight, Quantised) else weight.dtype
    bound = _BOUNDS.get(numbers, TOLERANCE[weight.dtype])
    return bool((expected - got).abs().amax() <= bound * expected.abs().amax())
