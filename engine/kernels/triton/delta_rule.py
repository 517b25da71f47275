"""Gated delta rule on GPUs: a token's update, and chunks of tokens by products.

In a chunk with decays exp(g) and their running sums G, the rows u that are added to the state S are
(I + A)·U = β·(V − exp(G)·K·S), with A[i, j] = β[i]·exp(G[i] − G[j])·(k[i]·k[j]) for j < i (the WY
form of Yang et al., 2024). I + A is inverted by products: blocks of 8 rows first, then the blocks.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from ..recurrence import L2_EPS, GatedDelta, RuleWeights
from .launch import arch_of, cdiv, launch, next_power_of_2
from .spans import SpanRows
from .tuned_tiles import config_for

EPS = tl.constexpr(L2_EPS)
# Rows of I + A that are inverted at once: in sums of their powers errors would grow with more.
NEAR = tl.constexpr(8)


def apply_delta_rule(
    kind: str,
    spans: SpanRows,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    weights: RuleWeights,
    rule: GatedDelta,
    states: Tensor,
    out: Tensor,
) -> None:
    """Apply the rule to a step's "decodes", spans of one token, or to its "chunks", the others."""
    block = max(16, next_power_of_2(rule.key_dim))
    config = config_for("delta_rule", arch_of(qkv.device), kind=kind, block=block)
    values = min(config.sizes["VALUES"], max(16, next_power_of_2(rule.value_dim)))
    config = replace(config, sizes={**config.sizes, "VALUES": values})
    grid = (len(spans.rows), rule.num_value_heads, cdiv(rule.value_dim, values))
    arguments = (
        *(*spans, qkv, a, b, weights.a_log, weights.dt_bias, states, out, a.stride(0), b.stride(0)),
        *(rule.num_key_heads, rule.num_value_heads, rule.key_dim**-0.5),
    )
    dims = {"KEY_DIM": rule.key_dim, "KEY_BLOCK": block, "VALUE_DIM": rule.value_dim}
    if kind == "decodes":
        launch(_delta_decodes, grid, *arguments, config=config, **dims)
    else:
        launch(_delta_chunks, grid, *arguments, config=config, **dims)


@triton.jit
def log_decay(rate, inputs):
    """Return the logarithm of the remaining share of a state: −rate · softplus(inputs)."""
    return -rate * softplus(inputs)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), which does not overflow for any x."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def product(x, y, KIND: tl.constexpr):
    """Return a product in fp32 of two matrices that are rounded to a dtype."""
    return tl.dot(x.to(KIND), y.to(KIND), input_precision="ieee")


@triton.jit(do_not_specialize=["num_key_heads", "num_heads", "scaling"])
def _delta_decodes(
    starts,
    sources,
    rows,
    qkv,  # [T, queries | keys | values]
    a,  # [T, Hv], its rows `a_stride` apart
    b,
    a_log,
    dt_bias,
    states,  # [rows, Hv, Dk, Dv]
    out,  # [T, Hv, Dv]
    a_stride,
    b_stride,
    num_key_heads,
    num_heads,
    scaling,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(starts + span)
    if tl.load(starts + span + 1) - begin != 1:
        return
    token = begin.to(tl.int64)
    dims, columns = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_number = is_dim[:, None] & is_column[None, :]
    keys = num_key_heads * KEY_DIM
    query_at = qkv + token * (2 * keys + num_heads * VALUE_DIM)
    query_at += head // (num_heads // num_key_heads) * KEY_DIM + dims
    query = tl.load(query_at, is_dim, other=0.0).to(tl.float32)
    key = tl.load(query_at + keys, is_dim, other=0.0).to(tl.float32)
    value_at = qkv + token * (2 * keys + num_heads * VALUE_DIM) + 2 * keys + head * VALUE_DIM
    value = tl.load(value_at + columns, is_column, other=0.0).to(tl.float32)
    query *= scaling / tl.sqrt(tl.sum(query * query, 0) + EPS)
    key /= tl.sqrt(tl.sum(key * key, 0) + EPS)
    rate = tl.exp(tl.load(a_log + head))
    inputs = tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    source, row = tl.load(sources + span).to(tl.int64), tl.load(rows + span).to(tl.int64)
    within = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
    size = num_heads * KEY_DIM * VALUE_DIM
    state = tl.load(states + source * size + within, is_number & (source >= 0), other=0.0)
    state *= tl.exp(log_decay(rate, inputs))
    error = beta * (value - tl.sum(key[:, None] * state, 0))
    state += key[:, None] * error[None, :]
    tl.store(states + row * size + within, state, is_number)
    mixed = tl.sum(query[:, None] * state, 0)
    out_at = out + (token * num_heads + head) * VALUE_DIM + columns
    tl.store(out_at, mixed.to(out.dtype.element_ty), is_column)


@triton.jit(do_not_specialize=["num_key_heads", "num_heads", "scaling"])
def _delta_chunks(
    starts,
    sources,
    rows,
    qkv,  # [T, queries | keys | values]
    a,  # [T, Hv], its rows `a_stride` apart
    b,
    a_log,
    dt_bias,
    states,  # [rows, Hv, Dk, Dv]
    out,  # [T, Hv, Dv]
    a_stride,
    b_stride,
    num_key_heads,
    num_heads,
    scaling,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    span, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts + span), tl.load(starts + span + 1)
    if end - begin < 2:
        return
    dims, columns = tl.arange(0, KEY_BLOCK), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    is_number = is_dim[:, None] & is_column[None, :]
    keys = num_key_heads * KEY_DIM
    width = 2 * keys + num_heads * VALUE_DIM
    from_span = qkv + begin.to(tl.int64) * width
    query_at = head // (num_heads // num_key_heads) * KEY_DIM + dims[None, :]
    value_at = 2 * keys + head * VALUE_DIM + columns[None, :]
    rate, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    source, row = tl.load(sources + span).to(tl.int64), tl.load(rows + span).to(tl.int64)
    within = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
    size = num_heads * KEY_DIM * VALUE_DIM
    state = tl.load(states + source * size + within, is_number & (source >= 0), other=0.0)
    KIND: tl.constexpr = qkv.dtype.element_ty
    order = tl.arange(0, TOKENS)
    for first in range(0, end - begin, TOKENS):
        is_token = first + order < end - begin
        tokens = (begin + first + order).to(tl.int64)
        at = ((first + order) * width)[:, None] + query_at
        is_key = is_token[:, None] & is_dim[None, :]
        key = _l2_normed(tl.load(from_span + keys + at, is_key, other=0.0), 1.0)  # [TOKENS, Dk]
        query = _l2_normed(tl.load(from_span + at, is_key, other=0.0), scaling)
        inputs = tl.load(a + tokens * a_stride + head, is_token, other=0.0).to(tl.float32) + bias
        decays = tl.where(is_token, log_decay(rate, inputs), 0.0)
        beta = tl.load(b + tokens * b_stride + head, is_token, other=0.0).to(tl.float32)
        beta = tl.where(is_token, tl.sigmoid(beta), 0.0)
        sums, last = tl.cumsum(decays, 0), tl.sum(decays, 0)
        is_seen = order[:, None] >= order[None, :]
        left = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))
        seen = tl.where(is_seen, product(query, tl.trans(key), KIND) * left, 0.0)
        met = product(key, tl.trans(key), KIND) * left * beta[:, None]
        met = tl.where(order[:, None] > order[None, :], met, 0.0)
        since = tl.exp(sums)[:, None]
        mixed = since * product(query, state, KIND)
        value = tl.load(
            from_span + ((first + order) * width)[:, None] + value_at,
            is_token[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)  # [TOKENS, VALUES]
        value = beta[:, None] * (value - since * product(key, state, KIND))
        added = product(_inverse(met, order, KIND), value, KIND)
        mixed += product(seen, added, KIND)
        out_at = out + (tokens * num_heads + head)[:, None] * VALUE_DIM + columns[None, :]
        is_out = is_token[:, None] & is_column[None, :]
        tl.store(out_at, mixed.to(out.dtype.element_ty), is_out)
        added *= tl.exp(last - sums)[:, None]
        state = state * tl.exp(last) + product(tl.trans(key), added, KIND)
    tl.store(states + row * size + within, state, is_number)


@triton.jit
def _l2_normed(x, scaling):
    """Return rows of an L2 norm of `scaling`, in their dtype."""
    wide = x.to(tl.float32)
    return (wide * (scaling / tl.sqrt(tl.sum(wide * wide, 1) + EPS))[:, None]).to(x.dtype)


@triton.jit
def _inverse(met, order, KIND: tl.constexpr):
    """Return the inverse of I + `met`, which is strictly lower triangular.

    Each diagonal block is inverted by the sum of its powers, up to the seventh; then the block
    between is multiplied by both.
    """
    tl.static_assert(met.shape[0] == 2 * NEAR)
    PRECISION: tl.constexpr = "ieee" if tl.float32 == KIND else "tf32"
    is_near = (order[:, None] // NEAR) == (order[None, :] // NEAR)
    one = tl.where(order[:, None] == order[None, :], 1.0, 0.0)
    power = tl.where(is_near, -met, 0.0)
    near = one + power
    for _ in tl.static_range(2):
        power = tl.dot(power, power, input_precision=PRECISION)
        near += tl.dot(near, power, input_precision=PRECISION)
    between = tl.dot(near, tl.where(is_near, 0.0, met), input_precision=PRECISION)
    return near - tl.dot(between, near, input_precision=PRECISION)
