"""Attention over a paged KV cache, in torch: the reference, on any device.

One layer's cache is `keys [pages, Hkv, Dk, page_size]` and `values [pages, Hkv, page_size, Dv]`.
Keys lie transposed so that a score of 16 neighbouring tokens is one vector operation. Query heads
`h·G … h·G+G-1` read key head `h` (grouped queries). How a step is packed is told in `packed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.packed import Chunk, PackedStep

# Up to here two matrix products beat torch's CPU flash kernel: 0.35 against 0.56 ms at 165 tokens.
SHORT_LENGTH = 256


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, step: PackedStep) -> None:
    """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots."""
    keys.permute(0, 3, 1, 2)[step.token_pages, step.token_offsets] = key
    values.transpose(1, 2)[step.token_pages, step.token_offsets] = value


def gather(keys: Tensor, values: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Copy the first `length` tokens of `pages` out: `[Hkv, length, Dk]`, `[Hkv, length, Dv]`."""
    heads, key_dim = keys.shape[1], keys.shape[2]
    key = keys[pages].permute(1, 0, 3, 2).reshape(heads, -1, key_dim)  # [Hkv, n·page, Dk]
    value = values[pages].transpose(0, 1).reshape(heads, -1, values.shape[3])
    return key[:, :length], value[:, :length]


def attend(
    query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """Attend the last `t` positions to all `L`: `[t, Hq, Dk]`, `[Hkv, L, D…]` → `[t, Hq, Dv]`.

    Causal, within the window; scores and softmax in fp32.
    """
    tokens, length = query.shape[0], key.shape[1]
    group = shape.num_query_heads // shape.num_kv_heads
    grouped = query.view(tokens, shape.num_kv_heads, group, -1).permute(1, 2, 0, 3)
    scores = grouped.float() @ key.float()[:, None].transpose(-1, -2)  # [Hkv, G, t, L]
    scores *= shape.scaling
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores.masked_fill_(~visible(tokens, length, shape.window, query.device), float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(shape.num_kv_heads, group, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    mixed = weights @ value.float()[:, None]  # [Hkv, G, t, Dv]
    return mixed.permute(2, 0, 1, 3).reshape(tokens, shape.num_query_heads, -1).to(query.dtype)


def visible(tokens: int, length: int, window: int, device: torch.device) -> Tensor:
    """Say which of `length` keys the last `tokens` queries see: bool `[tokens, length]`."""
    queries = torch.arange(length - tokens, length, device=device)[:, None]
    positions = torch.arange(length, device=device)[None]
    seen = positions <= queries
    return seen & (positions > queries - window) if window else seen


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PackedStep,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one query a sequence to its pages: `query [N, Hq, Dk]` → `[N, Hq, Dv]`."""
    rows = []
    lengths = step.decode_lengths.tolist()
    for row, length in enumerate(lengths):
        pages = step.decode_pages[row, : -(-length // keys.shape[3])].long()
        key, value = gather(keys, values, pages, length)
        rows.append(attend(query[row : row + 1], key, value, shape, sinks))
    return torch.cat(rows)


def prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: Chunk,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one chunk to its context and itself: `query [t, Hq, Dk]` → `[t, Hq, Dv]`.

    Plain causal attention goes through torch's flash kernel, or what is faster for a short one; a
    softcap, sinks, or keys and values of unequal width take the reference.
    """
    length = chunk.context + query.shape[0]
    key, value = gather(keys, values, chunk.pages, length)
    if shape.softcap or sinks is not None or shape.key_dim != shape.value_dim:
        return attend(query, key, value, shape, sinks)
    if query.device.type == "cpu" and length <= SHORT_LENGTH:
        return _attend_short(query, key, value, shape)
    causal = chunk.context == 0 and not (shape.window and shape.window < length)
    mask = None if causal else visible(query.shape[0], length, shape.window, query.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],  # [1, Hq, t, D]
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=causal,
        scale=shape.scaling,
        enable_gqa=shape.num_query_heads != shape.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _attend_short(query: Tensor, key: Tensor, value: Tensor, shape: AttentionShape) -> Tensor:
    """Do what `attend` does for plain attention, with products in the model's dtype."""
    tokens, length = query.shape[0], key.shape[1]
    heads = shape.num_kv_heads
    folded = query.view(tokens, heads, -1, shape.key_dim).permute(1, 2, 0, 3)  # [Hkv, G, t, Dk]
    scores = (folded.reshape(heads, -1, shape.key_dim) @ key.transpose(-1, -2)).float()
    scores = scores.mul_(shape.scaling).view(heads, -1, tokens, length)
    hidden = ~visible(tokens, length, shape.window, query.device)
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1).to(value.dtype)
    mixed = weights.view(heads, -1, length) @ value  # [Hkv, G·t, Dv]
    mixed = mixed.view(heads, -1, tokens, shape.value_dim).permute(2, 0, 1, 3)
    return mixed.reshape(tokens, shape.num_query_heads, shape.value_dim)
