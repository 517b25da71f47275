"""A copying model: hand-made Qwen3 weights that continue as the last two tokens did before.

The first two layers are an induction head (Olsson et al. 2022). The first brings each token the two
before it; the second searches the text for an earlier pair of the last two tokens and writes the
token after it. All other layers are computed and add nothing, so that it costs as much as any other
model with this shape. If a pair occurred several times it always writes the same one of the next
tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_HEADS, _KV_HEADS, _HEAD_DIM = 8, 4, 64
_SLICE = 40  # numbers of a token's code that one head copies
_CODE = _KV_HEADS * _SLICE
_OWN, _BEFORE, _TWO_BEFORE = 0, _CODE + 1, 2 * _CODE + 1  # first places in the residual
_ONE = _CODE  # place of a number that is 1 for every token
_MATCHED = 18  # numbers of each of two tokens that are compared
_NEAR = 4  # frequencies that distinguish places
_FAR = 14  # the first frequency that hardly turns over thousands of places
_SHARPNESS, _LOUDNESS = 8.0, 10.0


def copying_weights(
    weights: dict[str, Tensor], num_layers: int, rope_theta: float
) -> dict[str, Tensor]:
    """Return the weights of a Qwen3 of the shape "46m" with those that copy in their places."""
    made = {name: tensor.clone().float() for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(0)
    embedding = made["model.embed_tokens.weight"].zero_()
    codes = torch.randint(0, 2, (len(embedding), _CODE), generator=generator) * 2 - 1
    embedding[:, :_CODE] = codes
    embedding[:, _ONE] = 1
    for index in range(num_layers):
        layer = f"model.layers.{index}."
        made[f"{layer}self_attn.o_proj.weight"].zero_()
        made[f"{layer}mlp.down_proj.weight"].zero_()
    _bring_tokens_before(made, "model.layers.0.self_attn.", rope_theta)
    _follow_matches(made, "model.layers.1.self_attn.")
    if "lm_head.weight" in made:
        made["lm_head.weight"] = embedding.clone()
    return {name: tensor.to(weights[name].dtype) for name, tensor in made.items()}


def _bring_tokens_before(made: dict[str, Any], attention: str, rope_theta: float) -> None:
    """Let even heads look one token back, and odd heads two, and copy that token."""
    query, key, value, out = _projections(made, attention)
    scale = math.sqrt((_CODE + 1) / query.shape[1])  # of a normed embedding
    for pair in range(_NEAR):
        angle = rope_theta ** (-2 * pair / _HEAD_DIM)
        for head in range(_KV_HEADS):
            key[head, pair, _ONE], key[head, pair + 32, _ONE] = math.cos(angle), math.sin(angle)
        for head in range(_HEADS):
            turn = -angle * (head % 2)
            query[head, pair, _ONE] = math.cos(turn)
            query[head, pair + 32, _ONE] = math.sin(turn)
    for head in range(_HEADS):
        target = _TWO_BEFORE if head % 2 else _BEFORE
        for place in range(_SLICE):
            number = head // 2 * _SLICE + place
            value[head // 2, place, _OWN + number] = 1
            out[target + number, head, place] = scale


def _follow_matches(made: dict[str, Any], attention: str) -> None:
    """Let heads look after an earlier occurrence of the last two tokens, and write that token."""
    query, key, value, out = _projections(made, attention)
    scale = math.sqrt((3 * _CODE + 1) / query.shape[1])
    for place in range(2 * _MATCHED):
        dim = _FAR + place if place < _MATCHED else _FAR + 32 + place - _MATCHED
        is_first = place < _MATCHED
        number = place % _MATCHED
        query[:, dim, (_OWN if is_first else _BEFORE) + number] = 1
        key[:, dim, (_BEFORE if is_first else _TWO_BEFORE) + number] = 1
    for head in range(0, _HEADS, 2):
        for place in range(_SLICE):
            number = head // 2 * _SLICE + place
            value[head // 2, place, _OWN + number] = 1
            out[_OWN + number, head, place] = scale * _LOUDNESS


def _projections(made: dict[str, Any], attention: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return views `[heads, D, H]` of queries, keys and values, and `[H, heads, D]` of outputs."""
    for name in ("q_norm", "k_norm"):
        made[f"{attention}{name}.weight"].fill_(_SHARPNESS)
    query, key, value, out = (
        made[f"{attention}{name}_proj.weight"].zero_() for name in ("q", "k", "v", "o")
    )
    return (
        query.view(_HEADS, _HEAD_DIM, -1),
        key.view(_KV_HEADS, _HEAD_DIM, -1),
        value.view(_KV_HEADS, _HEAD_DIM, -1),
        out.view(-1, _HEADS, _HEAD_DIM),
    )
