"""int8 linear layers on the CPU (W8A8): weights of a scale a row by tokens quantised as they come.

Four products an instruction and half of bf16's bytes, on processors with AVX512-VNNI. A token's
largest number becomes 127; the norm before a layer quantises in its own pass.
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
from .jit_cache import compiled
from .linear import PackedLinear, epilogue_arguments, pack_outputs, pack_panels
from .linear_panels import WIDTH, WORD_BYTES, ZERO_POINT
from .scalars import elements, larger, magnitude, narrow, ordered, to_byte, widen
from .simd import HAS_INT8_PRODUCT, HAS_PAIR_PRODUCT
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

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output for plain `x [T, I]`."""
        return self._multiply(quantise_rows(x))

    def normed(self, weight: Tensor, eps: float) -> NormedLinear:
        """Return the layer behind an RMS norm of `weight [I]`."""
        return lambda x, residual: self._multiply(add_rms_norm(x, residual, weight, eps))

    def _multiply(self, rows: Int8Rows) -> Tensor:
        out = torch.empty(len(rows.numbers), self.packed.shape[2], dtype=torch.bfloat16)
        self.packed.multiply_rows(rows.numbers, rows.scales.data_ptr(), out)
        return out


def supports(dtype: torch.dtype) -> bool:
    """Say whether int8 weights are multiplied on this CPU in a model of this dtype."""
    return HAS_INT8_PRODUCT and HAS_PAIR_PRODUCT and dtype == torch.bfloat16


def prepare(weight: Quantised, bias: Tensor | None, end: Epilogue) -> Int8Linear | None:
    """Prepare the layer of a quantised weight; None where it is not int8, or not supported."""
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
        )
    )


def quantise_rows(x: Tensor) -> Int8Rows:
    """Quantise `x [T, I]`; a row that holds a NaN or an infinity has such a scale."""
    x = x.contiguous()
    rows = _allocate(x)
    _quantise(shared_pool(), elements(x), rows.numbers.numpy(), rows.scales.numpy())
    return rows


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Int8Rows:
    """Quantise `elementwise.add_rms_norm`, or without x `[T, H]` `rms_norm` of the residual."""
    rows = _allocate(residual)
    own = elements(residual), weight.numpy(), np.float32(eps)
    out = rows.numbers.numpy(), rows.scales.numpy()
    if x is None:
        _norm(shared_pool(), *own, *out)
    else:
        _add_norm(shared_pool(), elements(x), *own, *out)
    return rows


def _allocate(x: Tensor) -> Int8Rows:
    return Int8Rows(torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x)))


@compiled
def _quantise_rows(item: Any, x: Any, numbers: Any, scales: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        most = magnitude(np.float32(0))
        for i in range(width):
            most = larger(most, magnitude(widen(x[row, i])))
        top = ordered(most)
        scales[row] = top / MOST
        inverse = MOST / top if top > 0 else np.float32(0)
        for i in range(width):
            numbers[row, i] = to_byte(widen(x[row, i]) * inverse)


@compiled
def _norm_rows(item: Any, x: Any, weight: Any, eps: Any, numbers: Any, scales: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        _normed_row(x[row], weight, eps, numbers[row], scales, row)


@compiled
def _add_norm_rows(
    item: Any, x: Any, residual: Any, weight: Any, eps: Any, numbers: Any, scales: Any
) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        for i in range(width):
            residual[row, i] = narrow(widen(residual[row, i]) + widen(x[row, i]), x[row, i])
        _normed_row(residual[row], weight, eps, numbers[row], scales, row)


@compiled
def _normed_row(x: Any, weight: Any, eps: Any, numbers: Any, scales: Any, row: Any) -> None:
    """Write one row's norm, quantised; nothing is rounded between the two."""
    width = len(x)
    total = np.float32(0)
    most = magnitude(np.float32(0))
    for i in range(width):
        value = widen(x[i])
        total += value * value
        most = larger(most, magnitude(value * weight[i]))
    top = ordered(most)
    scales[row] = top / (np.sqrt(total / np.float32(width) + eps) * MOST)
    inverse = MOST / top if top > 0 else np.float32(0)
    for i in range(width):
        numbers[i] = to_byte(widen(x[i]) * weight[i] * inverse)


@compiled
def _quantise(words: Any, x: Any, numbers: Any, scales: Any) -> None:
    parallel_for(words, num_items(*x.shape), _quantise_rows, (x, numbers, scales))


@compiled
def _norm(words: Any, x: Any, weight: Any, eps: Any, numbers: Any, scales: Any) -> None:
    parallel_for(words, num_items(*x.shape), _norm_rows, (x, weight, eps, numbers, scales))


@compiled
def _add_norm(
    words: Any, x: Any, residual: Any, weight: Any, eps: Any, numbers: Any, scales: Any
) -> None:
    arguments = (x, residual, weight, eps, numbers, scales)
    parallel_for(words, num_items(*x.shape), _add_norm_rows, arguments)
