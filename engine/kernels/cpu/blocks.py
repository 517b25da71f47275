"""The CPU's norm and gate: one pass over each row, fp32 inside."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.compiling import parallel
from engine.kernels.cpu.scalars import elements, narrow, sigmoid, widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last axis: `x […, H]`, fp32 `weight [H]` → `[…, H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _norm_rows(elements(flat), weight.numpy(), np.float32(eps), elements(out))
    return out.view(x.shape)


def silu_mul(both: Tensor) -> Tensor:
    """Return silu(gate) · up of gate and up side by side: `both […, 2·I]` → `[…, I]`."""
    flat = both.reshape(-1, both.shape[-1])
    out = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=both.dtype)
    _gate_rows(elements(flat), elements(out))
    return out.view(*both.shape[:-1], -1)


@parallel
def _norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    width = x.shape[1]
    for row in numba.prange(x.shape[0]):
        total = np.float32(0)
        for i in range(width):
            value = widen(x[row, i])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = narrow(widen(x[row, i]) * scale * weight[i], x[row, i])


@parallel
def _gate_rows(both: Any, out: Any) -> None:
    width = out.shape[1]
    for row in numba.prange(out.shape[0]):
        for i in range(width):
            g = widen(both[row, i])
            out[row, i] = narrow(g * sigmoid(g) * widen(both[row, width + i]), both[row, i])
