"""Attention of spans of many tokens on the CPU: two products, and a softmax of rows between them.

The query heads of a key head are rows of one product. At 166 tokens this takes half the time of
torch's flash attention, and less from there on.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.cpu.compiling import compiled, parallel
from engine.kernels.cpu.scalars import elements, exp, narrow, widen

LOWEST = np.float32(-1e30)
LANES = 16
# Rows that one thread takes at a time, queries that see the same keys, and scores at once.
ROWS_AT_ONCE = 16
QUERIES_AT_ONCE = 256
MOST_SCORES = 1 << 24


def attend_span(
    query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape, out: Tensor
) -> None:
    """Attend the last `t` positions to all `L`: `[t, Hq, Dk]`, `[Hkv, L, D…]` → `out [t, Hq, Dv]`.

    Plain causal attention, within the window. A score is rounded to the dtype before the softmax,
    which is fp32, and a weight after it, as by transformers' own attention.
    """
    tokens, length = query.shape[0], key.shape[1]
    fitting = MOST_SCORES // (shape.num_query_heads * length)
    count = max(1, min(QUERIES_AT_ONCE, fitting))
    for start in range(0, tokens, count):
        stop = min(start + count, tokens)
        first = max(0, length - tokens + start + 1 - shape.window) if shape.window else 0
        seen = slice(first, length - tokens + stop)
        _attend_block(query[start:stop], key[:, seen], value[:, seen], shape, out[start:stop])


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape, out: Tensor
) -> None:
    tokens, heads = query.shape[0], shape.num_kv_heads
    folded = query.view(tokens, heads, -1, shape.key_dim).permute(1, 2, 0, 3)  # [Hkv, G, t, Dk]
    scores = torch.bmm(folded.reshape(heads, -1, shape.key_dim), key.transpose(1, 2))
    _soften(
        elements(scores.view(-1, key.shape[1])),  # [Hq·t, L]
        tokens,
        np.int64(shape.window or np.iinfo(np.int64).max),
        np.float32(shape.scaling),
    )
    mixed = torch.bmm(scores, value).view(heads, -1, tokens, shape.value_dim)
    out.view(tokens, heads, -1, shape.value_dim).copy_(mixed.permute(2, 0, 1, 3))


@parallel
def _soften(scores: Any, tokens: Any, window: Any, scaling: Any) -> None:
    for block in numba.prange((scores.shape[0] + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE):
        _soften_rows(scores, block * ROWS_AT_ONCE, tokens, window, scaling)


@compiled
def _soften_rows(scores: Any, start: Any, tokens: Any, window: Any, scaling: Any) -> None:
    rows, length = scores.shape
    wide = np.empty(length, np.float32)
    lanes = np.empty(LANES, np.float32)
    for row in range(start, min(start + ROWS_AT_ONCE, rows)):
        stop = length - tokens + row % tokens + 1
        _soften_row(scores[row], max(0, stop - window), stop, scaling, wide, lanes)


@compiled
def _soften_row(
    scores: Any,  # [L], of which `first:stop` are seen
    first: Any,
    stop: Any,
    scaling: Any,
    wide: Any,  # [L] float32
    lanes: Any,  # [LANES] float32
) -> None:
    # Every loop counts from 0: an index that might be negative keeps LLVM from vectors.
    like = scores[0]
    for i in range(first):
        scores[i] = narrow(LOWEST, like)
    for lane in range(LANES):
        lanes[lane] = LOWEST
    for block in range(stop // LANES):
        for lane in range(LANES):
            score = widen(scores[LANES * block + lane])
            lanes[lane] = max(lanes[lane], score)
    peak = LOWEST
    for lane in range(LANES):
        peak = max(peak, lanes[lane])
    for i in range(stop % LANES):
        peak = max(peak, widen(scores[stop - 1 - i]))
    for i in range(stop):
        wide[i] = exp((widen(scores[i]) - peak) * scaling)
    total = np.float32(0)
    for i in range(stop):
        total += wide[i]
    share = np.float32(1) / total
    for i in range(stop):
        scores[i] = narrow(wide[i] * share, like)
    for i in range(first):
        scores[i] = narrow(np.float32(0), like)
    for i in range(scores.shape[0] - stop):
        scores[stop + i] = narrow(np.float32(0), like)
