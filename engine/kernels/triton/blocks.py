"""The GPU's norms and gates; the reference is `engine.kernels.blocks`.

One program a row, which is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.choices import choose
from engine.kernels.triton.launching import arch_of, launch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Blocks.rms_norm`; moves 2·T·H numbers of x's dtype and the weight."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    width = rows.shape[1]
    choice = choose("rms_norm", arch_of(x.device), width=width)
    block = triton.next_power_of_2(width)
    grid = (len(rows),)
    launch(_rms_norm, grid, rows, weight, out, width, eps, choice=choice, BLOCK=block)
    return out.view(x.shape)


@triton.jit
def _rms_norm(x, weight, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    is_there = columns < width
    numbers = tl.load(x + row + columns, is_there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    weights = tl.load(weight + columns, is_there, other=0.0).to(tl.float32)
    normed = (numbers * scale * weights).to(out.dtype.element_ty)
    tl.store(out + row + columns, normed, is_there)
