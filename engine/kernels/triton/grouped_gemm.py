"""Grouped GEMM on GPUs: multiplies rows that are sorted by expert by each expert's own weight.

One launch serves all experts, as only the device knows how many rows each has. It gathers the rows,
adds the biases and joins gates with their ups, so that none of that is a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..elementwise import Gate
from ..quantised import Quantised
from . import linear, tuned_tiles
from .elementwise import gated
from .launch import arch_of, launch
from .tuned_tiles import KernelConfig

# Classes of an expert's average rows, which tiles are tuned by.
FEWEST_ROWS, MOST_ROWS = 8, 128
# Triton vectorises what is a multiple of it.
ALIGNED = 16


def grouped_linear(
    x: Tensor,
    tokens: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stops: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """Multiply rows up to each of the `stops [E]` by that expert's weight: `[E, O, I]` → `[S, O]`.

    Rows are gathered from `x [T, I]` by `tokens [S]`, or are those of `x [S, I]`. A `bias [E, O]`
    is added. With a `gate` the first half of the outputs are gates of the second: → `[S, O / 2]`.
    Moves S numbers for each input and output, and the weights of each expert that has rows once for
    every tile of them.
    """
    x, weight = x.contiguous(), weight.contiguous()
    num_experts, outputs, inner = weight.shape
    width = outputs if gate is None else outputs // 2
    count = len(x) if tokens is None else len(tokens)
    config = _config_for("grouped", x, count, weight.shape, gate)
    tiles = num_tiles(count, num_experts, config.sizes["ROWS"])
    out = x.new_empty(count, width)
    launch(
        *(_grouped, (tiles * triton.cdiv(width, config.sizes["COLUMNS"]),)),
        *(x, tokens, weight, bias, stops, out, tiles, num_experts, width, inner),
        config=config, EXPERTS=triton.next_power_of_2(num_experts),
        IS_EVEN=inner % config.sizes["INNER"] == 0, **_constants(gate),
    )  # fmt: skip
    return out


def grouped_quantised(
    x: Tensor,
    tokens: Tensor | None,
    weight: Quantised,
    bias: Tensor | None,
    stops: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """Multiply rows by quantised weights `[E, O, I]`, which are dequantised in registers.

    See `grouped_linear`; the columns of `x` are in the weight's order.
    """
    x = x.contiguous()
    num_experts, outputs, inputs = weight.shape
    width = outputs if gate is None else outputs // 2
    count = len(x) if tokens is None else len(tokens)
    config = _config_for("grouped_few_bits", x, count, weight.shape, gate)
    tiles = num_tiles(count, num_experts, config.sizes["ROWS"])
    out = x.new_empty(count, width)
    arrays = x, tokens, linear.bytes_of(weight), weight.scales, weight.zeros, bias, stops, out
    launch(
        *(_grouped_few_bits, (tiles * triton.cdiv(width, config.sizes["OUTPUTS"]),), *arrays),
        *(tiles, num_experts, width, inputs, weight.numbers.shape[-1], weight.scales.shape[-1]),
        *linear.groups_of(weight), config=config, EXPERTS=triton.next_power_of_2(num_experts),
        **_constants(gate),
    )  # fmt: skip
    return out


def num_tiles(count: int, num_experts: int, rows: int) -> int:
    """Return the most tiles of so many rows that `count` rows may make, however they are sorted."""
    return (count + min(count, num_experts) * (rows - 1)) // rows


def _config_for(
    kernel: str, x: Tensor, count: int, shape: torch.Size, gate: Gate | None
) -> KernelConfig:
    """Return the config for experts of a shape and their average rows, as a power of two."""
    rows = triton.next_power_of_2(triton.cdiv(count, shape[0]))
    if shape[2] % ALIGNED:
        # Read number by number, large tiles would not fit the registers.
        rows = FEWEST_ROWS
    return tuned_tiles.config_for(
        kernel,
        arch_of(x.device),
        rows=min(max(rows, FEWEST_ROWS), MOST_ROWS),
        bits=8 * x.itemsize,
        is_gated=int(gate is not None),
        outputs=shape[1],
        inputs=shape[2],
    )


def _constants(gate: Gate | None) -> dict[str, Any]:
    """Return the constants that a kernel knows a gate by; no curve says that there is none."""
    is_none, gate = gate is None, gate or Gate()
    return {
        "CURVE": None if is_none else gate.activation,
        "STEEPNESS": gate.alpha,
        "LIMIT": gate.limit,
        "LIFT": gate.beta,
    }


# How many tiles there are changes with every step, and makes no other kernel.
@triton.jit(do_not_specialize=["num_tiles"])
def _grouped(
    x,  # [T, inner], or [S, inner]
    tokens,  # [S] int32, or None
    weight,  # [num_experts, width, inner]; with a CURVE [num_experts, 2 · width, inner]
    bias,  # [num_experts, width] or [num_experts, 2 · width], or None
    stops,  # [num_experts] int32
    out,  # [S, width]
    num_tiles,
    num_experts,
    width,
    inner,
    CURVE: tl.constexpr,
    STEEPNESS: tl.constexpr,
    LIMIT: tl.constexpr,
    LIFT: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # inner is a multiple of INNER
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILES: tl.constexpr,
):
    """Multiply some rows of one expert by some columns of its weight."""
    tile, block = _place_of(num_tiles, tl.cdiv(width, COLUMNS), TILES)
    expert, first, end = _tile_of(tile, stops, num_experts, EXPERTS, ROWS)
    if expert == num_experts:
        return
    rows = first + tl.arange(0, ROWS)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    # What lies beyond the last row or column is computed as that, and not stored.
    row, column = tl.minimum(rows, end - 1), tl.minimum(columns, width - 1)
    source = row if tokens is None else tl.load(tokens + row)
    places = tl.arange(0, INNER)
    from_x = x + source.to(tl.int64)[:, None] * inner + places[None, :]
    if CURVE is None:
        own = expert.to(tl.int64) * width + column
    else:
        own = expert.to(tl.int64) * width * 2 + column
    from_weight = weight + own[:, None] * inner + places[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if CURVE is None:
        for at in range(0, inner, INNER):
            left = _loaded(from_x + at, places < inner - at, IS_EVEN)
            right = _loaded(from_weight + at, places < inner - at, IS_EVEN)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        total = _biased(total, bias, own)
    else:
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        from_ups = weight + (own + width)[:, None] * inner + places[None, :]
        for at in range(0, inner, INNER):
            left = _loaded(from_x + at, places < inner - at, IS_EVEN)
            right = _loaded(from_weight + at, places < inner - at, IS_EVEN)
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
            right = _loaded(from_ups + at, places < inner - at, IS_EVEN)
            ups = tl.dot(left, tl.trans(right), ups, input_precision="ieee")
        total = _biased(total, bias, own)
        ups = _biased(ups, bias, own + width)
        total = gated(total, ups, CURVE, STEEPNESS, LIMIT, LIFT)
    is_there = (rows < end)[:, None] & (columns < width)[None, :]
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), is_there)


@triton.jit
def _loaded(pointers, is_place, IS_EVEN: tl.constexpr):
    """Load numbers; behind the last place of each row there are zeros."""
    if IS_EVEN:
        return tl.load(pointers)
    return tl.load(pointers, is_place[None, :], other=0.0)


@triton.jit
def _biased(total, bias, own):
    """Add each column's bias, if there is one."""
    if bias is not None:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    return total


@triton.jit
def _place_of(num_tiles, num_blocks, TILES: tl.constexpr):
    """Return a program's tile of rows and its block of columns.

    Programs that run at the same time have some TILES and all their columns, so that both rows and
    weights are met again in the L2 cache.
    """
    at = tl.program_id(0)
    first = at // (TILES * num_blocks) * TILES
    several = min(num_tiles - first, TILES)
    at = at % (TILES * num_blocks)
    return first + at % several, at // several


@triton.jit
def _tile_of(tile, stops, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert, its first row and where that expert's end.

    Tiles that are left over have the expert behind the last.
    """
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    ends = tl.load(stops + experts, is_expert, other=0)
    begins = tl.load(stops + experts - 1, is_expert & (experts > 0), other=0)
    tiles = tl.cdiv(tl.where(is_expert, ends - begins, 0), ROWS)
    expert = tl.sum((is_expert & (tl.cumsum(tiles, 0) <= tile)).to(tl.int32), 0)
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(experts == expert, begins, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    return expert, begin + (tile - first) * ROWS, end


# Numbers of groups change with the weight, and make no other kernel.
@triton.jit(do_not_specialize=["num_tiles", "groups", "steps_a_group"])
def _grouped_few_bits(
    x,  # [T, inputs], or [S, inputs]
    tokens,  # [S] int32, or None
    numbers,  # [num_experts, outputs, words]: int32 with zeros, else uint8
    scales,  # [num_experts, outputs, groups]
    zeros,  # the same, or None
    bias,  # [num_experts, outputs], or None
    stops,  # [num_experts] int32
    out,  # [S, width]; width is outputs, with a CURVE half of them
    num_tiles,
    num_experts,
    width,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,  # of a step
    CURVE: tl.constexpr,
    STEEPNESS: tl.constexpr,
    LIMIT: tl.constexpr,
    LIFT: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Multiply some rows of one expert by some outputs of its weight."""
    tile, block = _place_of(num_tiles, tl.cdiv(width, OUTPUTS), TILES)
    expert, begin, behind = _tile_of(tile, stops, num_experts, EXPERTS, ROWS)
    if expert == num_experts:
        return
    row = begin + tl.arange(0, ROWS)
    has_row = row < behind
    source = row if tokens is None else tl.load(tokens + row, has_row, other=0)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < width
    if CURVE is None:
        own = expert.to(tl.int64) * width + output
    else:
        own = expert.to(tl.int64) * width * 2 + output
    total = linear.accumulated(
        *(x, source.to(tl.int64), has_row, numbers, scales, zeros),
        *(own, has_output, 0, tl.cdiv(inputs, linear.STEP)),
        *(inputs, words, groups, steps_a_group, GROUPS, ROWS, OUTPUTS),
    )
    if bias is not None:
        total += tl.load(bias + own, has_output, other=0.0).to(tl.float32)[:, None]
    if CURVE is not None:
        ups = linear.accumulated(
            *(x, source.to(tl.int64), has_row, numbers, scales, zeros),
            *(own + width, has_output, 0, tl.cdiv(inputs, linear.STEP)),
            *(inputs, words, groups, steps_a_group, GROUPS, ROWS, OUTPUTS),
        )
        if bias is not None:
            added = tl.load(bias + own + width, has_output, other=0.0)
            ups += added.to(tl.float32)[:, None]
        total = gated(total, ups, CURVE, STEEPNESS, LIMIT, LIFT)
    to = out + row.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), has_row[None, :] & has_output[:, None])
