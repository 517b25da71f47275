"""int8 linear layers on the CPU (W8A8): weights with row scales, tokens quantised on the fly.

They need four products per instruction and half of bf16's bytes, on processors with AVX512-VNNI. A
token is rotated like the weight, and its largest number becomes 127; the norm before a layer does
both in its own pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..elementwise import Gate
from ..linear import Epilogue, NormedLinear
from ..quantised import INT8_MAX, Quantised
from .elementwise import num_items, rows_at_once
from .jit_cache import compiled, inlined
from .linear import PackedLinear, epilogue_arguments, pack_outputs, pack_panels
from .linear_panels import WIDTH, WORD_BYTES, ZERO_POINT
from .scalars import elements, larger, magnitude, narrow, ordered, to_byte, widen
from .simd import HAS_INT8_PRODUCT, HAS_PAIR_PRODUCT, rotate
from .thread_pool import parallel_for, pool_size, shared_pool

MOST = np.float32(INT8_MAX)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations quantised to int8: (number - 128) · scale of the row."""

    numbers: Tensor  # [T, I], uint8
    scales: Tensor  # [T], fp32


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """Linear layer of int8 weights and activations, which the norm before it may quantise."""

    packed: PackedLinear
    rotation: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for plain `x [T, I]`."""
        return self._multiply(quantise_rows(x, self.rotation))

    def normed(self, weight: Tensor, eps: float) -> NormedLinear:
        """Return the layer after an RMS norm of `weight [I]`."""
        size = self.rotation
        return lambda x, residual: self._multiply(add_rms_norm(x, residual, weight, eps, size))

    def _multiply(self, rows: Int8Rows) -> Tensor:
        out = torch.empty(len(rows.numbers), self.packed.shape[2], dtype=torch.bfloat16)
        self.packed.multiply_rows(rows.numbers, rows.scales.data_ptr(), out)
        return out


def supports(dtype: torch.dtype) -> bool:
    """Return whether int8 weights are multiplied on this CPU in a model of this dtype."""
    return HAS_INT8_PRODUCT and HAS_PAIR_PRODUCT and dtype == torch.bfloat16


def prepare(weight: Quantised, bias: Tensor | None, end: Epilogue) -> Int8Linear | None:
    """Prepare the layer of a quantised weight; None if it is not int8, or not supported."""
    outputs, inputs = weight.shape
    if weight.numbers.dtype != torch.int8 or inputs % WORD_BYTES or not supports(weight.dtype):
        return None
    halves = 2 if isinstance(end, Gate) else 1
    starts = weight.numbers.sum(-1, dtype=torch.int32) * -ZERO_POINT
    of_outputs = (
        pack_outputs(bias, outputs, halves),
        pack_outputs(weight.scales.flatten(), outputs, halves),
        pack_outputs(starts, outputs, halves, torch.int32).view(torch.float32),
    )
    return Int8Linear(
        PackedLinear(
            panels=pack_panels(weight.numbers, halves),
            biases=torch.stack(of_outputs, 1),
            shape=(
                2,
                inputs // WORD_BYTES,
                outputs // halves,
                WIDTH // halves,
                3 * WIDTH * WORD_BYTES,
            ),
            like=np.uint8(0),
            ending=epilogue_arguments(end),
            threads=pool_size(),
        ),
        weight.rotation,
    )


def quantise_rows(x: Tensor, rotation: int = 1) -> Int8Rows:
    """Quantise `x [T, I]`, rotated; a row with a NaN or an infinity gets such a scale."""
    x = x.contiguous()
    rows = _allocate(x)
    _quantise(shared_pool(), elements(x), rotation, rows.numbers.numpy(), rows.scales.numpy())
    return rows


def add_rms_norm(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, rotation: int = 1
) -> Int8Rows:
    """Quantise `elementwise.add_rms_norm`, or without x `[T, H]` `rms_norm` of the residual."""
    rows = _allocate(residual)
    own = elements(residual), weight.numpy(), np.float32(eps), rotation
    out = rows.numbers.numpy(), rows.scales.numpy()
    if x is None:
        _norm(shared_pool(), *own, *out)
    else:
        _add_norm(shared_pool(), elements(x), *own, *out)
    return rows


def _allocate(x: Tensor) -> Int8Rows:
    return Int8Rows(torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x)))


@inlined
def _round_row(x: Any, rotation: Any, numbers: Any) -> Any:
    """Rotate a row, write its int8 numbers, and return its largest magnitude."""
    if rotation > 1:
        for start in range(0, len(x), rotation):
            rotate(x, start)
    most = magnitude(np.float32(0))
    for i in range(len(x)):
        most = larger(most, magnitude(x[i]))
    top = ordered(most)
    inverse = MOST / top if top > 0 else np.float32(0)
    for i in range(len(x)):
        numbers[i] = to_byte(x[i] * inverse)
    return top / np.sqrt(np.float32(rotation))


@compiled
def _quantise_rows(item: Any, x: Any, rotation: Any, numbers: Any, scales: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    own = np.empty(width, np.float32)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        for i in range(width):
            own[i] = widen(x[row, i])
        scales[row] = _round_row(own, rotation, numbers[row]) / MOST


@compiled
def _norm_rows(
    item: Any, x: Any, weight: Any, eps: Any, rotation: Any, numbers: Any, scales: Any
) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    own = np.empty(width, np.float32)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        scales[row] = _normed_row(x[row], weight, eps, rotation, own, numbers[row])


@compiled
def _add_norm_rows(
    item: Any,
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    rotation: Any,
    numbers: Any,
    scales: Any,
) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    own = np.empty(width, np.float32)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        for i in range(width):
            residual[row, i] = narrow(widen(residual[row, i]) + widen(x[row, i]), x[row, i])
        scales[row] = _normed_row(residual[row], weight, eps, rotation, own, numbers[row])


@inlined
def _normed_row(x: Any, weight: Any, eps: Any, rotation: Any, own: Any, numbers: Any) -> Any:
    """Write one row's norm, quantised, and return its scale; `own [H]` is scratch space.

    Nothing is rounded before it is quantised: the scale includes the norm.
    """
    width = len(x)
    total = np.float32(0)
    for i in range(width):
        value = widen(x[i])
        total += value * value
        own[i] = value * weight[i]
    top = _round_row(own, rotation, numbers)
    return top / (np.sqrt(total / np.float32(width) + eps) * MOST)


@compiled
def _quantise(words: Any, x: Any, rotation: Any, numbers: Any, scales: Any) -> None:
    arguments = (x, rotation, numbers, scales)
    parallel_for(words, num_items(*x.shape), _quantise_rows, arguments)


@compiled
def _norm(
    words: Any, x: Any, weight: Any, eps: Any, rotation: Any, numbers: Any, scales: Any
) -> None:
    arguments = (x, weight, eps, rotation, numbers, scales)
    parallel_for(words, num_items(*x.shape), _norm_rows, arguments)


@compiled
def _add_norm(
    words: Any,
    x: Any,
    residual: Any,
    weight: Any,
    eps: Any,
    rotation: Any,
    numbers: Any,
    scales: Any,
) -> None:
    arguments = (x, residual, weight, eps, rotation, numbers, scales)
    parallel_for(words, num_items(*x.shape), _add_norm_rows, arguments)
