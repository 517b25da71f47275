"""Mixture of experts (MoE) on GPUs, without a device sync: routing, sort, combine.

The reference is `engine.kernels.experts`; the products are in `grouped_gemm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..elementwise import Activation, ElementwiseOps, Gate, activate
from ..experts import ExpertWeights
from ..quantised import Matrix, Quantised
from . import linear, tuned_tiles
from .elementwise import quantise_fp8
from .grouped_gemm import grouped_fp8, grouped_linear, grouped_quantised, supports_fp8
from .launch import arch_of, cdiv, launch, next_power_of_2

# Range of rows in which each power of two has its own class of sort.
FEW_CHOICES, MANY_CHOICES = 2048, 8192
# Scores are clamped to it, so that their differences are finite.
BOUND = tl.constexpr(1e38)


class SortedRows(NamedTuple):
    """Rows sorted by expert, one for each expert of each token: all int32."""

    tokens: Tensor  # [T · count], the token of each row
    places: Tensor  # [T · count], the rows of each token, one after the other
    stops: Tensor  # [E], the end of each expert's rows


def select_experts(
    scores: Tensor, count: int, *, among_chosen: bool, is_renormalised: bool
) -> tuple[Tensor, Tensor]:
    """See `ExpertOps.select_experts`; the first of equal scores is chosen. Experts are int32.

    Moves T·E numbers of the scores' dtype and 8·T·count bytes.
    """
    scores = scores.contiguous()
    experts = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    shares = torch.empty(len(scores), count, dtype=torch.float32, device=scores.device)
    launch(
        *(_choose, (len(scores),), scores, experts, shares, scores.shape[1]),
        config=tuned_tiles.config_for("choose_experts", arch_of(scores.device)),
        COUNT=count, OF_CHOSEN=among_chosen or is_renormalised,
        BLOCK=next_power_of_2(scores.shape[1]), CHOSEN=next_power_of_2(count),
    )  # fmt: skip
    return experts, shares


def apply_experts(
    x: Tensor,
    experts: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    gate: Gate | Activation,
    ops: ElementwiseOps,  # noqa: ARG001 - gates are joined within the product
) -> Tensor:
    """See `ExpertOps.apply_experts`."""
    rows = sort_by_expert(experts, weights.down.shape[0])
    joined = gate if isinstance(gate, Gate) else None
    inner = _products(
        x, rows.tokens, weights.gate_up, weights.gate_up_bias, rows.stops, joined
    )  # [T · count, I]
    if not isinstance(gate, Gate):
        inner = activate(inner, gate)
    out = _products(inner, None, weights.down, weights.down_bias, rows.stops)
    return combine_experts(out, rows.places, shares)


def sort_by_expert(experts: Tensor, num_experts: int) -> SortedRows:
    """Sort the rows of each token's `experts [T, count]` by expert, stably.

    Reads 8·E·T·count bytes, nearly all from a cache, and writes 8·T·count + 4·E.
    """
    chosen = experts.to(torch.int32).contiguous()
    tokens, places = (torch.empty_like(chosen).view(-1) for _ in range(2))
    stops = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    rows = min(max(next_power_of_2(chosen.numel()), FEW_CHOICES), MANY_CHOICES)
    config = tuned_tiles.config_for("sort_experts", arch_of(chosen.device), rows=rows)
    arrays = chosen, tokens, places, stops
    launch(
        *(_sort, (num_experts,), *arrays, chosen.numel()), config=config, COUNT=chosen.shape[1]
    )  # fmt: skip
    return SortedRows(tokens, places, stops)


def combine_experts(rows: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Sum each token's rows by routing weight, rounded once: `[S, H]`, `[T, count]` → `[T, H]`.

    `places [T · count]` are their rows. Moves T·H·(count + 1) numbers and 8·T·count bytes.
    """
    width = rows.shape[1]
    out = rows.new_empty(len(shares), width)
    config = tuned_tiles.config_for("combine_experts", arch_of(rows.device))
    grid = (len(shares), cdiv(width, config.sizes["BLOCK"]))
    arrays = rows, places, shares.contiguous(), out
    launch(_combine, grid, *arrays, width, config=config, COUNT=shares.shape[1])
    return out


def _products(
    x: Tensor,
    tokens: Tensor | None,
    weight: Matrix,
    bias: Tensor | None,
    stops: Tensor,
    gate: Gate | None = None,
) -> Tensor:
    if isinstance(weight, Quantised):
        if weight.order is not None:
            x = x[:, weight.order]
        if supports_fp8(weight):
            rows = quantise_fp8(x, weight.group)
            return grouped_fp8(rows, tokens, weight, bias, stops, gate)
        count = len(x) if tokens is None else len(tokens)
        # An expert's product is one like a dense layer's, of its average rows.
        most = linear.most_rows(weight) * weight.shape[0]
        if linear.supports(weight) and count <= most:
            return grouped_quantised(x, tokens, weight, bias, stops, gate)
        weight = linear.dequantised(weight)
    return grouped_linear(x, tokens, weight, bias, stops, gate)


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
    # NaNs come first.
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
    places,
    stops,  # [E] int32
    num_rows,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find one expert's rows, which follow those of all experts before it."""
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
        tl.store(places + rows, place, is_own == 1)
        stop += tl.sum(is_own, 0)
    tl.store(stops + expert, stop)


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
