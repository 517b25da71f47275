"""Selective state space of Mamba-2 on GPUs: a token's update, and chunks of tokens by products.

In a chunk with decays exp(g) and their running sums G, y = exp(G)·C·Sᵀ + (M ∘ C·Bᵀ)·X, with
M[i, j] = exp(G[i] − G[j])·dt[j] for j ≤ i (the dual form of Dao and Gu, 2024).
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ..recurrence import RuleWeights, StateSpace
from .delta_rule import product, softplus
from .launch import arch_of, cdiv, launch, next_power_of_2
from .spans import SpanRows
from .tuned_tiles import config_for


def scan(
    kind: str,
    spans: SpanRows,
    xbc: Tensor,
    dt: Tensor,
    weights: RuleWeights,
    rule: StateSpace,
    states: Tensor,
    out: Tensor,
) -> None:
    """Scan a step's "decodes", spans of one token, or its "chunks", the others."""
    block = max(16, next_power_of_2(rule.state_dim))
    config = config_for("state_space", arch_of(xbc.device), kind=kind, block=block)
    inputs = min(config.sizes["INPUTS"], max(16, next_power_of_2(rule.head_dim)))
    config = replace(config, sizes={**config.sizes, "INPUTS": inputs})
    grid = (len(spans.rows), rule.num_heads, cdiv(rule.head_dim, inputs))
    arguments = (
        *(*spans, xbc, dt, weights.a_log, weights.dt_bias, weights.d, states, out, dt.stride(0)),
        *(rule.num_heads, rule.num_groups, *rule.dt_limit),
    )
    dims = {"HEAD_DIM": rule.head_dim, "STATE_DIM": rule.state_dim, "STATE_BLOCK": block}
    has_skip = weights.d is not None
    if kind == "decodes":
        launch(_space_decodes, grid, *arguments, config=config, HAS_SKIP=has_skip, **dims)
    else:
        launch(_space_chunks, grid, *arguments, config=config, HAS_SKIP=has_skip, **dims)


@triton.jit(do_not_specialize=["num_heads", "num_groups", "least", "most"])
def _space_decodes(
    starts,
    sources,
    rows,
    xbc,  # [T, x | B | C]
    dt,  # [T, H], its rows `stride` apart
    a_log,
    dt_bias,
    skip,
    states,  # [rows, H, P, N]
    out,  # [T, H, P]
    stride,
    num_heads,
    num_groups,
    least,
    most,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    INPUTS: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts + span)
    if tl.load(starts + span + 1) - begin != 1:
        return
    token = begin.to(tl.int64)
    dims, columns = tl.arange(0, STATE_BLOCK), tl.program_id(2) * INPUTS + tl.arange(0, INPUTS)
    is_dim, is_column = dims < STATE_DIM, columns < HEAD_DIM
    is_number = is_column[:, None] & is_dim[None, :]
    inner, group = num_heads * HEAD_DIM, num_groups * STATE_DIM
    own = xbc + token * (inner + 2 * group)
    from_b = own + inner + head // (num_heads // num_groups) * STATE_DIM + dims
    x = tl.load(own + head * HEAD_DIM + columns, is_column, other=0.0).to(tl.float32)
    b = tl.load(from_b, is_dim, other=0.0).to(tl.float32)
    c = tl.load(from_b + group, is_dim, other=0.0).to(tl.float32)
    step = tl.load(dt + token * stride + head).to(tl.float32) + tl.load(dt_bias + head)
    step = tl.minimum(tl.maximum(softplus(step), least), most)
    source, row = tl.load(sources + span).to(tl.int64), tl.load(rows + span).to(tl.int64)
    within = (head * HEAD_DIM + columns)[:, None] * STATE_DIM + dims[None, :]
    size = num_heads * HEAD_DIM * STATE_DIM
    state = tl.load(states + source * size + within, is_number & (source >= 0), other=0.0)
    state *= tl.exp(-tl.exp(tl.load(a_log + head)) * step)
    state += (step * x)[:, None] * b[None, :]
    tl.store(states + row * size + within, state, is_number)
    mixed = tl.sum(state * c[None, :], 1)
    if HAS_SKIP:
        mixed += tl.load(skip + head) * x
    out_at = out + (token * num_heads + head) * HEAD_DIM + columns
    tl.store(out_at, mixed.to(out.dtype.element_ty), is_column)


@triton.jit(do_not_specialize=["num_heads", "num_groups", "least", "most"])
def _space_chunks(
    starts,
    sources,
    rows,
    xbc,  # [T, x | B | C]
    dt,  # [T, H], its rows `stride` apart
    a_log,
    dt_bias,
    skip,
    states,  # [rows, H, P, N]
    out,  # [T, H, P]
    stride,
    num_heads,
    num_groups,
    least,
    most,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + span), tl.load(starts + span + 1)
    if end - begin < 2:
        return
    dims, columns = tl.arange(0, STATE_BLOCK), tl.program_id(2) * INPUTS + tl.arange(0, INPUTS)
    is_dim, is_column = dims < STATE_DIM, columns < HEAD_DIM
    is_number = is_column[:, None] & is_dim[None, :]
    inner, group = num_heads * HEAD_DIM, num_groups * STATE_DIM
    width = inner + 2 * group
    from_inputs = xbc + head * HEAD_DIM + columns[None, :]
    from_b = xbc + inner + head // (num_heads // num_groups) * STATE_DIM + dims[None, :]
    rate, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    source, row = tl.load(sources + span).to(tl.int64), tl.load(rows + span).to(tl.int64)
    within = (head * HEAD_DIM + columns)[:, None] * STATE_DIM + dims[None, :]
    size = num_heads * HEAD_DIM * STATE_DIM
    state = tl.load(states + source * size + within, is_number & (source >= 0), other=0.0)
    KIND: tl.constexpr = xbc.dtype.element_ty
    order = tl.arange(0, TOKENS)
    for first in range(begin, end, TOKENS):
        is_token = first + order < end
        tokens = (first + order).to(tl.int64)
        is_input = is_token[:, None] & is_column[None, :]
        is_state = is_token[:, None] & is_dim[None, :]
        at = tokens[:, None] * width
        x = tl.load(from_inputs + at, is_input, other=0.0).to(tl.float32)  # [TOKENS, INPUTS]
        b = tl.load(from_b + at, is_state, other=0.0).to(tl.float32)  # [TOKENS, N]
        c = tl.load(from_b + at + group, is_state, other=0.0).to(tl.float32)
        step = tl.load(dt + tokens * stride + head, is_token, other=0.0).to(tl.float32) + bias
        step = tl.minimum(tl.maximum(softplus(step), least), most)
        step = tl.where(is_token, step, 0.0)
        decays = -rate * step
        sums, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
        is_seen = order[:, None] >= order[None, :]
        left = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0)) * step[None, :]
        seen = tl.where(is_seen, product(c, tl.trans(b), KIND) * left, 0.0)
        mixed = tl.exp(sums)[:, None] * product(c, tl.trans(state), KIND) + product(seen, x, KIND)
        if HAS_SKIP:
            mixed += tl.load(skip + head) * x
        out_at = out + (tokens * num_heads + head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_at, mixed.to(out.dtype.element_ty), is_input)
        x *= (step * tl.exp(last - sums))[:, None]
        state = state * tl.exp(last) + product(tl.trans(x), b, KIND)
    tl.store(states + row * size + within, state, is_number)
