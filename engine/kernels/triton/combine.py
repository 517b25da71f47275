"""Combines split-KV partial attention outputs by their log-sum-exp (flash decoding).

Each part has its own highest score. Parts of one token are contiguous; a program combines those of
some of its heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import tile_buffers
from .launch import arch_of, cdiv, launch, launches_none, next_power_of_2
from .tiles import JOIN_FIELDS
from .tuned_tiles import config_for

LOG2_E = tl.constexpr(math.log2(math.e))
NUM_JOINS, JOINS = tl.constexpr(tile_buffers.NUM_JOINS), tl.constexpr(tile_buffers.JOINS)
FIELDS = tl.constexpr(JOIN_FIELDS)


class PartialOutputs(NamedTuple):
    """Workspace for partial attention outputs over part of the places that each row sees, in fp32.

    A part is the sum of values, each weighted by 2 to the power of its score minus the highest; the
    highest score; and the sum of the weights. Layers use the workspace one after another.
    """

    values: Tensor  # flat: at least parts · Hq · Dv
    states: Tensor  # flat: at least parts · Hq · 2


def combine(
    tiles: tuple[Tensor, int], most: int, parts: PartialOutputs, sinks: Tensor | None, out: Tensor
) -> None:
    """Combine the parts of each of up to `most` split tokens into `out [T, Hq, Dv]`.

    `tiles` are the tile buffers and the offset of the header. `sinks [Hq]` join the softmax. Reads
    parts · Hq · (Dv + 2) fp32 numbers and writes tokens · Hq · Dv of out's dtype.
    """
    if launches_none(most):
        return
    _, heads, width = out.shape
    config = config_for("attention_joining", arch_of(out.device), width=width)
    launch(
        _join,
        (most * cdiv(heads, config.sizes["HEADS"]),),
        *(*tiles, *parts, sinks, out, heads),
        config=config,
        WIDTH=width,
        BLOCK=max(16, next_power_of_2(width)),
        HAS_SINKS=sinks is not None,
    )


@triton.jit(do_not_specialize=["header", "num_heads"])
def _join(
    numbers,
    header,
    values,
    states,
    sinks,
    out,
    num_heads,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    at_once = tl.cdiv(num_heads, HEADS)
    number = tl.program_id(0) // at_once
    if number >= tl.load(numbers + header + NUM_JOINS):
        return
    fields = numbers + tl.load(numbers + header + JOINS) + number * FIELDS
    token, first, count = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    heads = tl.program_id(0) % at_once * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    columns = tl.arange(0, BLOCK)
    is_there = is_head[:, None] & (columns < WIDTH)[None, :]  # [HEADS, BLOCK]
    if HAS_SINKS:
        peak = tl.load(sinks + heads, is_head, other=0.0).to(tl.float32) * LOG2_E
        mass = tl.full([HEADS], 1.0, tl.float32)
    else:
        peak = tl.full([HEADS], float("-inf"), tl.float32)
        mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, BLOCK], tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        rows = (first + part).to(tl.int64)[None, :] * num_heads + heads[:, None]
        is_row = is_head[:, None] & (part < count)[None, :]  # [HEADS, PARTS]
        peaks = tl.load(states + 2 * rows, is_row, other=float("-inf"))
        masses = tl.load(states + 2 * rows + 1, is_row, other=0.0)
        places = rows[:, :, None] * WIDTH + columns[None, None, :]
        is_value = is_row[:, :, None] & (columns < WIDTH)[None, None, :]
        summed = tl.load(values + places, is_value, other=0.0)
        highest = tl.maximum(peak, tl.max(peaks, 1))
        # If nothing was visible yet.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base[:, None])
        total = total * shrink[:, None] + tl.sum(summed * weights[:, :, None], 1)
        mass = mass * shrink + tl.sum(masses * weights, 1)
        peak = highest
    share = 1 / tl.where(mass > 0, mass, 1.0)
    rows = token.to(tl.int64) * num_heads + heads
    joined = (total * share[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], joined, is_there)
