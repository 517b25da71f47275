"""Norms and gated activations on the CPU: one pass over each row, fp32 arithmetic.

Each function replaces the one of its name in `kernels.elementwise`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import elementwise
from ..elementwise import Gate
from .jit_cache import compiled, inlined
from .scalars import elements, narrow, sigmoid, widen
from .thread_pool import parallel_for, shared_pool

# Numbers of one work item: fewer take less time than waking another thread.
NUMBERS_AT_ONCE = 16_384
# gelu's tanh as a sigmoid: x · sigmoid(2·√(2/π) · (x + 0.044715·x³)).
GELU_SLOPE, GELU_CUBE = np.float32(1.5957691216057308), np.float32(0.044715)


def norm_weight(stored: Tensor, offset: float) -> Tensor:
    """Return a norm's weight in fp32, plus its family's offset."""
    return stored.float() + offset


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last axis: `x […, H]`, fp32 `weight [H]` → `[…, H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _norm(shared_pool(), elements(flat), weight.numpy(), np.float32(eps), elements(out))
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x [T, H]` to `residual [T, H]`, in place, and return the norm of the sum."""
    out = torch.empty_like(residual)
    arrays = elements(x), elements(residual), weight.numpy()
    _add_norm(shared_pool(), *arrays, np.float32(eps), elements(out))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the norm of `x [T, H]` by mean and variance, times `weight [H]`, plus `bias`."""
    out = torch.empty_like(x)
    numbers = weight.numpy(), bias.numpy(), np.float32(eps)
    _layer_norm(shared_pool(), elements(x), *numbers, elements(out))
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Add `x [T, H]` to `residual [T, H]`, in place, and return the `layer_norm` of the sum."""
    out = torch.empty_like(residual)
    numbers = weight.numpy(), bias.numpy(), np.float32(eps)
    _add_layer_norm(shared_pool(), elements(x), elements(residual), *numbers, elements(out))
    return out


def act_and_mul(both: Tensor, gate: Gate) -> Tensor:
    """Activate the gate and multiply by up, which are side by side: `[…, 2·I]` → `[…, I]`."""
    if gate.activation == "gelu":
        return elementwise.act_and_mul(both.float(), gate).to(both.dtype)
    flat = both.reshape(-1, both.shape[-1])
    out = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=both.dtype)
    limit = np.float32(np.inf if gate.limit is None else gate.limit)
    numbers = (np.float32(gate.alpha), limit, np.float32(gate.beta))
    is_gelu = gate.activation == "gelu_tanh"
    _gate(shared_pool(), elements(flat), is_gelu, *numbers, elements(out))
    return out.view(*both.shape[:-1], -1)


@compiled
def rows_at_once(width: Any) -> Any:
    """Return the rows of one work item."""
    return max(1, NUMBERS_AT_ONCE // width)


@compiled
def num_items(rows: Any, width: Any) -> Any:
    """Return the work items for some rows."""
    at_once = rows_at_once(width)
    return (rows + at_once - 1) // at_once


@compiled
def _norm_rows(item: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        total = np.float32(0)
        for i in range(width):
            value = widen(x[row, i])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = narrow(widen(x[row, i]) * scale * weight[i], x[row, i])


@compiled
def _add_norm_rows(item: Any, x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        total = np.float32(0)
        for i in range(width):
            added = narrow(widen(residual[row, i]) + widen(x[row, i]), x[row, i])
            residual[row, i] = added
            value = widen(added)
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = narrow(widen(residual[row, i]) * scale * weight[i], x[row, i])


@compiled
def _layer_norm_rows(item: Any, x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        _center(x[row], weight, bias, eps, out[row])


@compiled
def _add_layer_norm_rows(
    item: Any, x: Any, residual: Any, weight: Any, bias: Any, eps: Any, out: Any
) -> None:
    rows, width = x.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        for i in range(width):
            residual[row, i] = narrow(widen(residual[row, i]) + widen(x[row, i]), x[row, i])
        _center(residual[row], weight, bias, eps, out[row])


@inlined
def _center(x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    """Write the norm of one row by mean and variance."""
    width = len(x)
    total = np.float32(0)
    for i in range(width):
        total += widen(x[i])
    mean = total / np.float32(width)
    squares = np.float32(0)
    for i in range(width):
        apart = widen(x[i]) - mean
        squares += apart * apart
    scale = np.float32(1) / np.sqrt(squares / np.float32(width) + eps)
    for i in range(width):
        out[i] = narrow((widen(x[i]) - mean) * scale * weight[i] + bias[i], x[i])


@compiled
def _gate_rows(
    item: Any, both: Any, is_gelu: Any, alpha: Any, limit: Any, beta: Any, out: Any
) -> None:
    rows, width = out.shape
    at_once = rows_at_once(width)
    for row in range(item * at_once, min((item + 1) * at_once, rows)):
        for i in range(width):
            # This order preserves NaN.
            g = min(widen(both[row, i]), limit)
            up = max(min(widen(both[row, width + i]), limit), -limit) + beta
            slope = GELU_SLOPE * (g + GELU_CUBE * g * g * g) if is_gelu else alpha * g
            out[row, i] = narrow(g * sigmoid(slope) * up, both[row, i])


@compiled
def _norm(words: Any, x: Any, weight: Any, eps: Any, out: Any) -> None:
    parallel_for(words, num_items(*x.shape), _norm_rows, (x, weight, eps, out))


@compiled
def _add_norm(words: Any, x: Any, residual: Any, weight: Any, eps: Any, out: Any) -> None:
    parallel_for(words, num_items(*x.shape), _add_norm_rows, (x, residual, weight, eps, out))


@compiled
def _layer_norm(words: Any, x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    parallel_for(words, num_items(*x.shape), _layer_norm_rows, (x, weight, bias, eps, out))


@compiled
def _add_layer_norm(
    words: Any, x: Any, residual: Any, weight: Any, bias: Any, eps: Any, out: Any
) -> None:
    arguments = (x, residual, weight, bias, eps, out)
    parallel_for(words, num_items(*x.shape), _add_layer_norm_rows, arguments)


@compiled
def _gate(words: Any, both: Any, is_gelu: Any, alpha: Any, limit: Any, beta: Any, out: Any) -> None:
    items = num_items(*out.shape)
    parallel_for(words, items, _gate_rows, (both, is_gelu, alpha, limit, beta, out))
