"""fp8 products of weights that are scaled in blocks of 128 × 128, by torch (cuBLAS) on Hopper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from ..linear import CHECKED_ROWS, TOLERANCE
from ..quantised import BLOCK, Fp8Rows
from . import fp8
from .elementwise import quantise_fp8
from .fp8 import Fp8Weight
from .launch import arch_of

# cuBLAS has these products only for this architecture, from 12.9 on.
ARCHITECTURES = {"sm_90"}
# From this many rows on, its tile for many of them is full on all multiprocessors.
MANY_ROWS = 256
# cuBLAS reads a column of blocks' scales at multiples of this.
ALIGNED_BLOCKS = 4

logger = logging.getLogger(__name__)


def prepare(weight: Fp8Weight, dtype: torch.dtype) -> Callable[[Fp8Rows], Tensor] | None:
    """Prepare x · weightᵀ; None if torch lacks such a product, refuses it, or gives another result.

    Products on random rows of a dtype show what another CUDA's torch refuses; it is logged once.
    """
    numbers, group = weight.numbers, weight.group
    is_whole = all(side % BLOCK == 0 for side in numbers.shape)
    is_blocks = weight.scaling == "block" and group == BLOCK
    if not (is_blocks and is_whole and arch_of(numbers.device) in ARCHITECTURES):
        return None
    scales = pad(weight.scales, (0, -weight.scales.shape[1] % ALIGNED_BLOCKS)).T

    def product(x: Fp8Rows) -> Tensor:
        out = scaled_mm(
            x.numbers,
            numbers.T,
            x.scales.T,
            ScalingType.BlockWise1x128,
            scales,
            ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )
        return out[: x.count]

    problem = _problem(product, weight, dtype)
    if problem is None:
        return product
    _log(problem)
    return None


def _problem(
    product: Callable[[Fp8Rows], Tensor], weight: Fp8Weight, dtype: torch.dtype
) -> str | None:
    """Return the problem with a product, by comparing it with our own on random rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MANY_ROWS + CHECKED_ROWS, weight.numbers.shape[1], generator=generator)
    rows = quantise_fp8(x.to(weight.numbers.device, dtype), BLOCK)
    try:
        got = product(rows)
    except (RuntimeError, ValueError) as exc:
        return str(exc).partition("\n")[0]
    if got.is_meta:
        return None
    expected = fp8.multiply(rows, weight, None).float()
    apart = (got.float() - expected).abs().amax()
    # A comparison that fails for NaN, too.
    is_near = bool(apart <= TOLERANCE[dtype] * expected.abs().amax())
    return None if is_near else f"it differs from our own by {float(apart):.2g}"


@cache
def _log(problem: str) -> None:
    logger.warning("block-scaled fp8 uses our own kernel instead of torch's: %s", problem)
