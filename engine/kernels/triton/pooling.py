"""Pooling of token vectors to one embedding per sequence, on GPUs.

The reference is `engine.kernels.pooling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..pooling import Segments
from .launch import arch_of, cdiv, launch, next_power_of_2
from .tuned_tiles import config_for

MODES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")
# The smallest norm by which a vector is divided.
SHORTEST = tl.constexpr(1e-12)


def pool(hidden: Tensor, segments: Segments, modes: Sequence[str]) -> Tensor:
    """See `PoolingOps.pool`; a mode moves N·H numbers, of the first or last S·H, and 4·S·H bytes.

    A sequence is summed in the same order whatever else is in the batch.
    """
    hidden = hidden.contiguous()
    count, width = len(segments.skipped), hidden.shape[1]
    out = hidden.new_empty(count, len(modes) * width, dtype=torch.float32)
    config = config_for("pool", arch_of(hidden.device), width=width)
    for place, mode in enumerate(modes):
        launch(
            *(_pool, (count, cdiv(width, config.sizes["COLUMNS"]))),
            *(hidden, *segments, out, width, len(modes) * width, place * width),
            config=config, MODE=mode,
        )  # fmt: skip
    return out


def normalise(x: Tensor) -> Tensor:
    """See `PoolingOps.normalise`; moves 8·S·D bytes."""
    rows = x.contiguous()
    out = torch.empty_like(rows)
    count, width = rows.shape
    block = next_power_of_2(width)
    config = config_for("unit", arch_of(x.device), width=width)
    launch(_unit, (count,), rows, out, width, config=config, BLOCK=block)
    return out


@triton.jit
def _pool(
    hidden,  # [N, width]
    starts,  # [S + 1] of integers
    skipped,  # [S] of integers
    out,  # [S, stride] fp32, of which columns from `first` on are written
    width,
    stride,
    first,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Pool some columns of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    start = tl.load(starts + sequence).to(tl.int64)
    stop = tl.load(starts + sequence + 1).to(tl.int64)
    if MODE == "cls":
        stop = start + 1
    if MODE == "lasttoken":
        start = stop - 1
    before = tl.load(skipped + sequence).to(tl.int64)
    nothing: tl.constexpr = float("-inf") if MODE == "max" else 0.0
    total = tl.full([ROWS, COLUMNS], nothing, tl.float32)
    for at in range(start, stop, ROWS):
        rows = at + tl.arange(0, ROWS)
        is_there = (rows < stop)[:, None] & is_column[None, :]
        source = hidden + rows[:, None] * width + columns[None, :]
        numbers = tl.load(source, is_there, other=nothing).to(tl.float32)
        if MODE == "max":
            total = tl.maximum(total, numbers, propagate_nan=tl.PropagateNan.ALL)
        elif MODE == "weightedmean":
            total += numbers * (before + 1 + rows - start)[:, None].to(tl.float32)
        else:
            total += numbers
    count = tl.maximum(stop - start, 1)  # a sequence that fills up a step has no tokens
    if MODE == "max":
        # A maximum over the rows would ignore NaN.
        is_none = tl.max((total <= float("inf")).to(tl.int32) ^ 1, 0) == 1
        pooled = tl.where(is_none, float("nan"), tl.max(total, 0))
    else:
        pooled = tl.sum(total, 0)
    if MODE == "mean":
        pooled /= count.to(tl.float32)
    if MODE == "mean_sqrt_len_tokens":
        pooled /= tl.sqrt(count.to(tl.float32))
    if MODE == "weightedmean":
        pooled /= (count * before + count * (count + 1) // 2).to(tl.float32)
    tl.store(out + sequence * stride + first + columns, pooled, is_column)


@triton.jit
def _unit(
    x,  # [S, width]
    out,  # the same
    width,
    BLOCK: tl.constexpr,
):
    """Normalise one vector to length 1."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    is_there = columns < width
    numbers = tl.load(x + row + columns, is_there, other=0.0)
    length = tl.sqrt(tl.sum(numbers * numbers, 0))
    tl.store(out + row + columns, numbers / tl.maximum(length, SHORTEST), is_there)
