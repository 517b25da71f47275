"""Grouped GEMM on GPUs: multiplies rows that are sorted by expert by each expert's own weight.

One launch serves all experts, as only the device knows how many rows each has. It gathers the rows,
adds the biases and joins gates with their ups, so that none of these needs a separate pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..elementwise import Gate
from ..quantised import BLOCK, Fp8Rows, Quantised
from . import fp8, linear, tuned_tiles
from .elementwise import gated
from .launch import arch_of, cdiv, launch, next_power_of_2
from .tuned_tiles import KernelConfig

# Classes of an expert's average rows, by which tiles are tuned.
FEWEST_ROWS, MOST_ROWS = 8, 128
# Triton vectorises loads at multiples of this.
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
    Moves S numbers for each input and output, and the weights of each expert with rows once for
    every tile of them.
    """
    count = len(x) if tokens is None else len(tokens)
    out = x.new_empty(count, weight.shape[1] if gate is None else weight.shape[1] // 2)
    _multiply(out, x.contiguous(), None, tokens, weight.contiguous(), None, bias, stops, gate)
    return out


def grouped_fp8(
    x: Fp8Rows,
    tokens: Tensor | None,
    weight: Quantised,
    bias: Tensor | None,
    stops: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    """Multiply fp8 rows by fp8 weights `[E, O, I]`, both with the weight's groups of inputs.

    See `grouped_linear`; the weight is one that `supports_fp8`.
    """
    count = x.count if tokens is None else len(tokens)
    width = weight.shape[1] if gate is None else weight.shape[1] // 2
    out = torch.empty(count, width, dtype=x.dtype, device=x.numbers.device)
    numbers = x.numbers, x.scales, tokens, weight.numbers, weight.scales
    _multiply(out, *numbers, bias, stops, gate, group=weight.group)
    return out


def supports_fp8(weight: Quantised) -> bool:
    """Return whether `grouped_fp8` takes a weight on its device."""
    return (
        fp8.has_fp8_matmul(weight.device)
        and fp8.supports_groups(weight)
        and all(side % ALIGNED == 0 for side in weight.shape[1:])
    )


def _multiply(
    out: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
    tokens: Tensor | None,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    stops: Tensor,
    gate: Gate | None,
    group: int = 1,
) -> None:
    """Launch the kernel of plain and of fp8 numbers."""
    (count, width), (num_experts, _, inner) = out.shape, weight.shape
    scaling = "none" if scales is None else "row" if scales.shape[-1] == 1 else "group"
    config = _config_for("grouped", x, count, weight.shape, gate, scaling=scaling)
    assert scaling != "group" or group % config.sizes["INNER"] == 0
    tiles = num_tiles(count, num_experts, config.sizes["ROWS"])
    launch(
        *(_grouped, (tiles * cdiv(width, config.sizes["COLUMNS"]),)),
        *(x, x_scales, tokens, weight, scales, bias, stops, out),
        *(tiles, num_experts, width, inner, group),
        0 if x_scales is None else x_scales.shape[1], 1 if scales is None else scales.shape[-1],
        config=config, SCALING=scaling, EXPERTS=next_power_of_2(num_experts),
        IS_EVEN=inner % config.sizes["INNER"] == 0, **_constants(gate),
    )  # fmt: skip


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
    arrays = x, tokens, *linear.arrays_of(weight), bias, stops, out
    steps_a_group, groups = linear.groups_of(weight)
    launch(
        *(_grouped_few_bits, (tiles * cdiv(width, config.sizes["OUTPUTS"]),), *arrays),
        *(tiles, num_experts, width, inputs, weight.numbers.shape[-1], weight.scales.shape[-1]),
        steps_a_group, config=config, GROUPS=groups, IS_EVEN=inputs % BLOCK == 0,
        EXPERTS=next_power_of_2(num_experts), **_constants(gate),
    )  # fmt: skip
    return out


def num_tiles(count: int, num_experts: int, rows: int) -> int:
    """Return the most tiles of a number of rows that `count` rows may need, however sorted."""
    return (count + min(count, num_experts) * (rows - 1)) // rows


def _config_for(
    kernel: str, x: Tensor, count: int, shape: torch.Size, gate: Gate | None, **how: str
) -> KernelConfig:
    """Return the config for experts of a shape and their average rows, as a power of two."""
    rows = next_power_of_2(cdiv(count, shape[0]))
    if shape[2] % ALIGNED:
        # These are read number by number, so large tiles would not fit the registers.
        rows = FEWEST_ROWS
    return tuned_tiles.config_for(
        kernel,
        arch_of(x.device),
        rows=min(max(rows, FEWEST_ROWS), MOST_ROWS),
        bits=8 * x.itemsize,
        is_gated=int(gate is not None),
        outputs=shape[1],
        inputs=shape[2],
        **how,
    )


def _constants(gate: Gate | None) -> dict[str, Any]:
    """Return the constants by which a kernel selects a gate; an empty curve means none."""
    is_none, gate = gate is None, gate or Gate()
    return {
        "CURVE": None if is_none else gate.activation,
        "STEEPNESS": gate.alpha,
        "LIMIT": gate.limit,
        "LIFT": gate.beta,
    }


# The number of tiles changes with every step, and must not specialise the kernel.
@triton.jit(do_not_specialize=["num_tiles", "group", "padded_rows", "groups"])
def _grouped(
    x,  # [T, inner], or [S, inner]
    x_scales,  # [groups, padded_rows], or None
    tokens,  # [S] int32, or None
    weight,  # [num_experts, width, inner]; with a CURVE [num_experts, 2 · width, inner]
    scales,  # [num_experts, width or 2 · width, groups], or None
    bias,  # [num_experts, width] or [num_experts, 2 · width], or None
    stops,  # [num_experts] int32
    out,  # [S, width]
    num_tiles,
    num_experts,
    width,
    inner,
    group,
    padded_rows,
    groups,
    SCALING: tl.constexpr,  # "none", or by "row" or "group" of a row
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
    # Positions after the last row or column are computed like it, and not stored.
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
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    from_ups = from_weight + (width * inner).to(tl.int64)
    for at in range(0, inner, INNER):
        left = _loaded(from_x + at, places < inner - at, IS_EVEN)
        right = _loaded(from_weight + at, places < inner - at, IS_EVEN)
        of_row, of_column = x_scales, scales
        if SCALING == "group":
            of_row += at // group * padded_rows + source
            of_column += own * groups + at // group
        total = _added(total, left, right, of_row, of_column, SCALING == "group")
        if CURVE is not None:
            right = _loaded(from_ups + at, places < inner - at, IS_EVEN)
            if SCALING == "group":
                of_column += width * groups
            ups = _added(ups, left, right, of_row, of_column, SCALING == "group")
    if SCALING == "row":
        of_row = tl.load(x_scales + source)[:, None]
        total *= of_row * tl.load(scales + own)[None, :]
        if CURVE is not None:
            ups *= of_row * tl.load(scales + own + width)[None, :]
    total = _biased(total, bias, own)
    if CURVE is not None:
        ups = _biased(ups, bias, own + width)
        total = gated(total, ups, CURVE, STEEPNESS, LIMIT, LIFT)
    is_there = (rows < end)[:, None] & (columns < width)[None, :]
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), is_there)


@triton.jit
def _loaded(pointers, is_place, IS_EVEN: tl.constexpr):
    """Load numbers, with zeros after the last place of each row."""
    if IS_EVEN:
        return tl.load(pointers)
    return tl.load(pointers, is_place[None, :], other=0.0)


@triton.jit
def _added(total, left, right, of_row, of_column, IS_SCALED: tl.constexpr):
    """Add a block's products, each with the scales of its row and column."""
    if IS_SCALED:
        scale = tl.load(of_row)[:, None] * tl.load(of_column)[None, :]
        return total + tl.dot(left, tl.trans(right)) * scale
    return tl.dot(left, tl.trans(right), total, input_precision="ieee")


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
    """Return a tile's expert, its first row and the end of that expert's rows.

    Unused tiles have the number after the last expert.
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


# Numbers of groups change with the weight, and must not specialise the kernel.
@triton.jit(do_not_specialize=["num_tiles", "groups", "steps_a_group"])
def _grouped_few_bits(
    x,  # [T, inputs], or [S, inputs]
    tokens,  # [S] int32, or None
    numbers,  # [num_experts, outputs, words]: int32, of fp8 uint8
    scales,  # [num_experts, outputs, groups], of fp4 uint8
    zeros,  # the same, of int4
    row_scales,  # [num_experts, outputs, 1], if scales are fp8
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
    IS_EVEN: tl.constexpr,  # inputs are whole steps
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
    # Positions after the last row or output are computed like it, and not stored.
    source = tl.minimum(row, behind - 1)
    source = source if tokens is None else tl.load(tokens + source)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < width
    own = expert.to(tl.int64) * width
    if CURVE is not None:
        own = own * 2
    own += tl.minimum(output, width - 1)
    total = _sums(
        *(x, source.to(tl.int64), has_row, numbers, scales, zeros, row_scales, own, has_output),
        *(inputs, words, groups, steps_a_group, GROUPS, IS_EVEN, ROWS, OUTPUTS),
    )
    if bias is not None:
        total += tl.load(bias + own).to(tl.float32)[:, None]
    if CURVE is not None:
        ups = _sums(
            *(x, source.to(tl.int64), has_row, numbers, scales, zeros, row_scales),
            *(own + width, has_output),
            *(inputs, words, groups, steps_a_group, GROUPS, IS_EVEN, ROWS, OUTPUTS),
        )
        if bias is not None:
            ups += tl.load(bias + own + width).to(tl.float32)[:, None]
        total = gated(total, ups, CURVE, STEEPNESS, LIMIT, LIFT)
    to = out + row.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), has_row[None, :] & has_output[:, None])


@triton.jit
def _sums(
    x,
    source,
    has_row,
    numbers,
    scales,
    zeros,
    row_scales,
    own,
    has_output,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Return sums over all inputs, `[OUTPUTS, ROWS]`, in the way of `linear` for as many rows."""
    steps = tl.cdiv(inputs, linear.STEP)
    if ROWS <= linear.FEW or (ROWS < linear.WIDE and numbers.dtype.element_ty == tl.int32):
        total = linear.accumulated(
            *(x, source, has_row, numbers, scales, zeros, row_scales, own, has_output, 0, steps),
            *(inputs, words, groups, steps_a_group, GROUPS, ROWS, OUTPUTS),
        )
    else:
        total = linear.accumulated_wide(
            *(x, source, numbers, scales, zeros, row_scales, own, 0, steps),
            *(inputs, words, groups, steps_a_group, GROUPS, IS_EVEN, ROWS, OUTPUTS),
        )
    return total
