"""Split-k: programs share a product's inputs if its outputs are too few to fill a GPU.

Each leaves sums of its steps in fp32, and one pass adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import arch_of, cdiv, launch
from .tuned_tiles import config_for

# A share with fewer steps is mostly overhead.
FEWEST_STEPS = 2


def divide(steps: int, shares: int) -> tuple[int, int]:
    """Return the number of shares of steps, about the given number or one, and their steps."""
    each = cdiv(steps, max(min(shares, steps // FEWEST_STEPS), 1))
    return cdiv(steps, each), each


def join(parts: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Add up `parts [shares, T, O]`, fp32, and the bias, and return them in `out [T, O]`.

    Moves shares·T·O fp32 numbers and T·O of out's dtype.
    """
    count, outputs = out.numel(), out.shape[1]
    config = config_for("join", arch_of(out.device))
    grid = (cdiv(count, config.sizes["BLOCK"]),)
    launch(_join, grid, parts, bias, out, count, outputs, len(parts), config=config)
    return out


@triton.jit(do_not_specialize=["shares"])
def _join(
    parts,  # [shares, count]
    bias,  # [outputs], or None
    out,  # [count]
    count,
    outputs,
    shares,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < count
    total = tl.zeros((BLOCK,), tl.float32)
    for share in range(shares):
        total += tl.load(parts + share * count + place, is_there, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % outputs, is_there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), is_there)
