"""Mixture of experts (MoE) on GPUs, without a device sync: routing, grouped GEMM, combine.

The reference is `engine.kernels.experts`. Grouped products are torch.grouped_mm where that runs on
the device alone; elsewhere torch would read the group sizes on the host, so a kernel here does it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..elementwise import ElementwiseOps, Gate
from ..experts import ALIGNED_BYTES, ExpertWeights
from ..quantised import Matrix, Quantised
from . import linear, tuned_tiles
from .launch import arch_of, launch

# Where torch.grouped_mm runs on the device alone; elsewhere it reads `stops` on the host.
GROUPED_BY_TORCH = ("sm_90", "sm_100", "sm_103")
# Rows of an expert, on average, above which large tiles of them are full.
MANY_ROWS = 64
# Scores are clamped to it, so that their differences are finite.
BOUND = tl.constexpr(1e38)


class SortedRows(NamedTuple):
    """Rows sorted by expert, one for each expert of each token: all int32."""

    tokens: Tensor  # [T · count], the token of each row
    owners: Tensor  # [T · count], the expert of each row
    places: Tensor  # [T · count], the rows of each token, one after the other
    stops: Tensor  # [E], the end of each expert's rows


def select_experts(
    scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
) -> tuple[Tensor, Tensor]:
    """See `ExpertOps.select_experts`; of equal scores the first is chosen. Experts are int32.

    Moves T·E numbers of the scores' dtype and 8·T·count bytes.
    """
    scores = scores.contiguous()
    experts = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    shares = torch.empty(len(scores), count, dtype=torch.float32, device=scores.device)
    launch(
        *(_choose, (len(scores),), scores, experts, shares, scores.shape[1]),
        config=tuned_tiles.config_for("choose_experts", arch_of(scores.device)),
        COUNT=count, OF_CHOSEN=among_chosen or is_renormalised,
        BLOCK=triton.next_power_of_2(scores.shape[1]), CHOSEN=triton.next_power_of_2(count),
    )  # fmt: skip
    return experts, shares


def apply_experts(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    gate: Gate,
    ops: ElementwiseOps,
) -> Tensor:
    """See `ExpertOps.apply_experts`."""
    rows = sort_by_expert(experts, weights.down.shape[0])
    both = _products(x, rows.tokens, weights.gate_up, weights.gate_up_bias, rows)
    out = _products(ops.act_and_mul(both, gate), None, weights.down, weights.down_bias, rows)
    return combine_experts(out, rows.places, shares)


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedRows:
    """Sort the rows of each token's `experts [T, count]` by expert, stably.

    Reads 8·E·T·count bytes, nearly all from a cache, and writes 12·T·count + 4·E.
    """
    chosen = experts.to(torch.int32).contiguous()
    tokens, owners, places = (torch.empty_like(chosen).view(-1) for _ in range(3))
    stops = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    config = tuned_tiles.config_for("sort_experts", arch_of(chosen.device))
    arrays = chosen, tokens, owners, places, stops
    launch(
        *(_sort, (num_experts,), *arrays, chosen.numel()), config=config, COUNT=chosen.shape[1]
    )  # fmt: skip
    return SortedRows(tokens, owners, places, stops)


def grouped_linear(
    x: Tensor, tokens: Tensor | None, weight: Tensor, bias: Tensor | None, stops: Tensor
) -> Tensor:
    """Grouped GEMM: multiply rows up to each stop by that expert's weight: `[E, O, I]` → `[S, O]`.

    Rows are gathered from `x [T, I]` by `tokens [S]`, or are those of `x [S, I]`. A `bias [E, O]`
    is added. Moves S·(I + O) numbers, and the weights of each expert that has rows once for every
    tile of them.
    """
    x, weight = x.contiguous(), weight.contiguous()
    count = len(x) if tokens is None else len(tokens)
    num_experts, width, inner = weight.shape
    kind = "many" if count > MANY_ROWS * num_experts else "few"
    dtype = str(x.dtype).removeprefix("torch.")
    config = tuned_tiles.config_for("grouped", arch_of(x.device), rows=kind, dtype=dtype)
    at_once = config.sizes["ROWS"]
    # However rows fall to experts: each that has any leaves one tile half empty.
    tiles = (count + min(count, num_experts) * (at_once - 1)) // at_once
    out = x.new_empty(count, width)
    launch(
        *(_grouped, (tiles, triton.cdiv(width, config.sizes["COLUMNS"]))),
        *(x, tokens, weight, bias, stops, out, num_experts, width, inner),
        config=config, EXPERTS=triton.next_power_of_2(num_experts),
    )  # fmt: skip
    return out


def grouped_quantised(x: Tensor, tokens: Tensor | None, weight: Quantised, stops: Tensor) -> Tensor:
    """Grouped GEMM with quantised weights `[E, O, I]`, the columns of `x` in their order.

    Moves S·(I + O) numbers, and the bytes of each expert that has rows once for every tile of them.
    """
    x = x.contiguous()
    count = len(x) if tokens is None else len(tokens)
    num_experts, outputs, inputs = weight.shape
    config = tuned_tiles.config_for("grouped_few_bits", arch_of(x.device))
    at_once = config.sizes["ROWS"]
    tiles = (count + min(count, num_experts) * (at_once - 1)) // at_once
    out = x.new_empty(count, outputs)
    arrays = x, tokens, linear.bytes_of(weight), weight.scales, weight.zeros, stops, out
    launch(
        *(_grouped_few_bits, (tiles, triton.cdiv(outputs, config.sizes["OUTPUTS"])), *arrays),
        *(num_experts, outputs, inputs, weight.numbers.shape[-1], weight.scales.shape[-1]),
        *linear.groups_of(weight), config=config, EXPERTS=triton.next_power_of_2(num_experts),
    )  # fmt: skip
    return out


def combine_experts(rows: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Sum each token's rows by routing weight, rounded once: `[S, H]`, `[T, count]` → `[T, H]`.

    `places [T · count]` are their rows. Moves T·H·(count + 1) numbers and 8·T·count bytes.
    """
    width = rows.shape[1]
    out = rows.new_empty(len(shares), width)
    config = tuned_tiles.config_for("combine_experts", arch_of(rows.device))
    grid = (len(shares), triton.cdiv(width, config.sizes["BLOCK"]))
    arrays = rows, places, shares.contiguous(), out
    launch(_combine, grid, *arrays, width, config=config, COUNT=shares.shape[1])
    return out


def _products(
    x: Tensor, tokens: Tensor | None, weight: Matrix, bias: Tensor | None, rows: SortedRows
) -> Tensor:
    if isinstance(weight, Quantised):
        if weight.order is not None:
            x = x[:, weight.order]
        if linear.supports(weight) and len(rows.owners) <= MANY_ROWS * weight.shape[0]:
            out = grouped_quantised(x, tokens, weight, rows.stops)
            return out if bias is None else out.add_(bias[rows.owners])
        weight = linear.dequantised(weight)
    is_aligned = all(size * weight.itemsize % ALIGNED_BYTES == 0 for size in weight.shape[1:])
    is_torchs = weight.dtype == torch.bfloat16 and arch_of(x.device) in GROUPED_BY_TORCH
    if not is_torchs or not is_aligned:
        return grouped_linear(x, tokens, weight, bias, rows.stops)
    own = x if tokens is None else x[tokens]
    out = functional.grouped_mm(own, weight.transpose(1, 2), offs=rows.stops)
    if bias is not None:
        out += bias[rows.owners]
    return out


@triton.jit
def _choose(
    scores,  # [T, num_experts]
    experts,  # [T, COUNT] int32
    shares,  # [T, COUNT] fp32
    num_experts,
    COUNT: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Choose the best experts of one token, one after the other."""
    token = tl.program_id(0).to(tl.int64)
    columns, ranks = tl.arange(0, BLOCK), tl.arange(0, CHOSEN)
    is_there = columns < num_experts
    numbers = tl.load(scores + token * num_experts + columns, is_there, other=0.0).to(tl.float32)
    # What is no number comes first.
    left = tl.where(numbers < BOUND, numbers, BOUND)
    left = tl.where(is_there, tl.maximum(left, -BOUND), float("-inf"))
    top = tl.max(left, 0)
    best = tl.full([CHOSEN], float("-inf"), tl.float32)
    chosen = tl.zeros([CHOSEN], tl.int32)
    total = tl.sum(tl.exp(left - top), 0)
    for rank in range(COUNT):
        value = tl.max(left, 0)
        expert = tl.min(tl.where(left == value, columns, BLOCK), 0)
        best = tl.where(ranks == rank, value, best)
        chosen = tl.where(ranks == rank, expert, chosen)
        left = tl.where(columns == expert, float("-inf"), left)
    own = tl.exp(tl.where(best == BOUND, float("nan"), best) - top)
    if OF_CHOSEN:
        total = tl.sum(own, 0)
    is_chosen = ranks < COUNT
    tl.store(experts + token * COUNT + ranks, chosen, is_chosen)
    tl.store(shares + token * COUNT + ranks, own / total, is_chosen)


# How many rows there are changes with every step, and makes no other kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _sort(
    chosen,  # [num_rows] int32
    tokens,  # the same
    owners,
    places,
    stops,  # [E] int32
    num_rows,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find one expert's rows: behind those of all experts before it."""
    expert = tl.program_id(0)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_rows, BLOCK):
        rows = at + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        before += (tl.load(chosen + rows, is_row, other=expert) < expert).to(tl.int32)
    stop = tl.sum(before, 0)
    for at in range(0, num_rows, BLOCK):
        rows = at + tl.arange(0, BLOCK)
        is_own = (tl.load(chosen + rows, rows < num_rows, other=-1) == expert).to(tl.int32)
        place = stop + tl.cumsum(is_own, 0) - is_own
        tl.store(tokens + place, rows // COUNT, is_own == 1)
        tl.store(owners + place, expert, is_own == 1)
        tl.store(places + rows, place, is_own == 1)
        stop += tl.sum(is_own, 0)
    tl.store(stops + expert, stop)


@triton.jit
def _grouped(
    x,  # [T, inner], or [S, inner]
    tokens,  # [S] int32, or None
    weight,  # [num_experts, width, inner]
    bias,  # [num_experts, width], or None
    stops,  # [num_experts] int32
    out,  # [S, width]
    num_experts,
    width,
    inner,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Multiply some rows of one expert by some columns of its weight."""
    expert, first, end = _tile_of(stops, num_experts, EXPERTS, ROWS)
    if expert == num_experts:
        return
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    sources = rows if tokens is None else tl.load(tokens + rows, is_row, other=0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    places = tl.arange(0, INNER)
    from_x = x + sources.to(tl.int64)[:, None] * inner + places[None, :]
    from_weight = (
        (expert.to(tl.int64) * width + columns)[:, None] * inner + places[None, :] + weight
    )
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, inner, INNER):
        is_place = places < inner - at
        left = tl.load(from_x + at, is_row[:, None] & is_place[None, :], other=0.0)
        right = tl.load(from_weight + at, is_column[:, None] & is_place[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    if bias is not None:
        added = tl.load(bias + expert * width + columns, is_column, other=0.0)
        total += added.to(tl.float32)[None, :]
    to = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(to, total.to(out.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _tile_of(stops, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's expert, its first row and where that expert's end.

    Programs that are left over have the expert behind the last.
    """
    tile = tl.program_id(0)
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
@triton.jit(do_not_specialize=["groups", "steps_a_group"])
def _grouped_few_bits(
    x,  # [T, inputs], or [S, inputs]
    tokens,  # [S] int32, or None
    numbers,  # [num_experts, outputs, words]: int32 with zeros, else uint8
    scales,  # [num_experts, outputs, groups]
    zeros,  # the same, or None
    stops,  # [num_experts] int32
    out,  # [S, outputs]
    num_experts,
    outputs,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,  # of a step
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Multiply some rows of one expert by some outputs of its weight."""
    expert, begin, behind = _tile_of(stops, num_experts, EXPERTS, ROWS)
    if expert == num_experts:
        return
    row = begin + tl.arange(0, ROWS)
    has_row = row < behind
    source = row if tokens is None else tl.load(tokens + row, has_row, other=0)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < outputs
    total = linear.accumulated(
        *(x, source.to(tl.int64), has_row, numbers, scales, zeros),
        *(expert.to(tl.int64) * outputs + output, has_output, 0, tl.cdiv(inputs, linear.STEP)),
        *(inputs, words, groups, steps_a_group, GROUPS, ROWS, OUTPUTS),
    )
    to = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(to, total.to(out.dtype.element_ty), has_row[None, :] & has_output[:, None])


@triton.jit
def _combine(
    rows,  # [S, width]
    places,  # [T · COUNT] int32
    shares,  # [T, COUNT] fp32
    out,  # [T, width]
    width,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum some columns of one token's rows."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(COUNT):
        place = tl.load(places + token * COUNT + rank).to(tl.int64)
        numbers = tl.load(rows + place * width + columns, is_there, other=0.0).to(tl.float32)
        total += numbers * tl.load(shares + token * COUNT + rank)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), is_there)
