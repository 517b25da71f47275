"""Native encoder: one block for every family, over merged weights.

Queries, keys and values are one product. A sum with the residual is one pass with the norm that
follows. Activation and gate of the MLP are part of the product before them. After the last layer's
attention only the requested tokens are processed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ...kernels.attention import AttentionBackend
from ...kernels.backends import choose_elementwise, choose_linear
from ...kernels.elementwise import Activation, Gate, rotary_cos_sin
from ...kernels.linear import Linear, LinearFactory
from ...kernels.step import Step
from .architecture import EncoderArchitecture


@dataclass(frozen=True, slots=True)
class LayerNormWeights:
    """A norm by mean and variance, in the form that the device's functions take."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One block with its weights; `rope` counts among the encoder's."""

    rope: int
    qkv_proj: Linear
    o_proj: Linear
    post_attention_norm: LayerNormWeights
    up_proj: Linear
    down_proj: Linear
    post_mlp_norm: LayerNormWeights


class EncoderBlocks:
    """The blocks of an architecture with their weights by role, taken out of the dict.

    They count the layers that they start.
    """

    def __init__(
        self,
        model: EncoderArchitecture,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_layers_started = 0
        self._ops = choose_elementwise(dtype, device)
        self._eps, self._is_pre_norm = model.layer_norm_eps, model.is_pre_norm
        ropes = list(dict.fromkeys(block.rope for block in model.blocks))
        self._ropes = [
            (rope, torch.tensor(rope.inv_freq if rope else (), device=device)) for rope in ropes
        ]
        linear_factory = choose_linear(self._ops, device)
        self._layers = []
        for index, block in enumerate(model.blocks):
            role = f"{index}."
            self._layers.append(
                EncoderLayer(
                    rope=ropes.index(block.rope),
                    qkv_proj=_linear(linear_factory, weights, f"{role}qkv_proj"),
                    o_proj=_linear(linear_factory, weights, f"{role}o_proj"),
                    post_attention_norm=self._norm(weights, f"{role}post_attention_norm"),
                    up_proj=_activated_linear(
                        linear_factory, weights, f"{role}up_proj", model.activation
                    ),
                    down_proj=_linear(linear_factory, weights, f"{role}down_proj"),
                    post_mlp_norm=self._norm(weights, f"{role}post_mlp_norm"),
                )
            )
        self.needs_torch = linear_factory.needs_torch

    def run(self, x: Tensor, residual: Tensor, step: Step, attention: AttentionBackend) -> Tensor:
        """Return the last hidden states `[N, H]` of the step's rows, of the first input `x [T, H]`.

        `residual [T, H]` may be the same tensor, and is overwritten otherwise.
        """
        blocks, eps, rows = self._ops, self._eps, step.logit_rows
        cos_sin = [
            rotary_cos_sin(
                step.positions[:, None], frequencies, rope.attention_scaling if rope else 1.0
            )
            for rope, frequencies in self._ropes
        ]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            self.num_layers_started += 1
            query = attention.store_qkv(index, layer.qkv_proj(x), cos_sin[layer.rope], None)
            x = attention.attend(index, query).flatten(1)  # [T, Hq · D]
            if index == last and len(rows) < len(x):
                x, residual = x[rows], residual[rows]
            norm = layer.post_attention_norm
            x = blocks.add_layer_norm(layer.o_proj(x), residual, norm.weight, norm.bias, eps)
            residual = residual if self._is_pre_norm else x
            norm = layer.post_mlp_norm
            mixed = layer.down_proj(layer.up_proj(x))
            x = blocks.add_layer_norm(mixed, residual, norm.weight, norm.bias, eps)
            residual = residual if self._is_pre_norm else x
        return x

    def _norm(self, weights: dict[str, Tensor], role: str) -> LayerNormWeights:
        weight = weights.pop(role)
        bias = weights.pop(f"{role}_bias", torch.zeros_like(weight))
        as_wanted = self._ops.norm_weight
        return LayerNormWeights(as_wanted(weight, 0.0), as_wanted(bias, 0.0))


class Encoder(EncoderBlocks):
    """A `EncoderNetwork` of an architecture and its weights by role, taken out of the dict."""

    def __init__(self, model: EncoderArchitecture, weights: dict[str, Tensor]) -> None:
        words = weights.pop("word_embeddings")
        super().__init__(model, weights, words.dtype, words.device)
        self._words, self._places = words, _places(weights, words.dtype)
        self._num_positions = model.num_positions or 1
        self._has_positions = model.num_positions > 0
        self._first_position = model.first_position
        self._has_first_norm = model.has_first_norm
        self._embedding_norm = self._norm(weights, "embedding_norm")

    def can_replay(self, token_ids: NDArray[np.int32]) -> bool:
        """Return False if padding tokens within texts change positions; see `EncoderNetwork`."""
        padding_id = self._first_position - 1
        return padding_id < 0 or not (token_ids == padding_id).any()

    def encode(self, step: Step, type_ids: Tensor | None, attention: AttentionBackend) -> Tensor:
        """Run one step → `[N, H]` of its rows; see `EncoderNetwork.encode`."""
        words = functional.embedding(step.token_ids, self._words)  # [T, H]
        x = self._embedded(words, step, type_ids)
        return self.run(x, words if self._has_first_norm else x, step, attention)

    def _embedded(self, words: Tensor, step: Step, type_ids: Tensor | None) -> Tensor:
        """Return the norm of the embeddings of tokens; their sum replaces `words`."""
        norm = self._embedding_norm
        if self._places is None:
            return self._ops.layer_norm(words, norm.weight, norm.bias, self._eps)
        places = self._places_of(step)
        if type_ids is not None:
            places = places + type_ids * self._num_positions
        added = functional.embedding(places, self._places)
        return self._ops.add_layer_norm(added, words, norm.weight, norm.bias, self._eps)

    def _places_of(self, step: Step) -> Tensor:
        """Return rows of the position table; a padding token within a text has the padding row."""
        if not self._has_positions:
            return torch.zeros_like(step.positions)
        first = self._first_position
        if not first:
            return step.positions
        host = step.host  # reading a device would wait for it
        is_text = host.token_ids != first - 1
        if is_text.all():
            return step.positions + first
        counts = is_text.cumsum(0)
        begun = (counts - is_text.long())[host.query_starts[:-1].long()]
        lengths = host.query_starts.diff().long()
        places = (counts - begun.repeat_interleave(lengths)) * is_text + first - 1
        return places.int().to(step.positions.device)


def _places(weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the embeddings of each segment and position, one segment after another."""
    positions, types = (
        weights.pop("position_embeddings", None),
        weights.pop("token_type_embeddings", None),
    )
    if types is None:
        return positions
    if positions is None:
        return types
    added = types[:, None].float() + positions.float()  # [types, positions, H]
    return added.to(dtype).flatten(0, 1)


def _linear(linear_factory: LinearFactory, weights: dict[str, Tensor], role: str) -> Linear:
    return linear_factory.make(weights.pop(role), weights.pop(f"{role}_bias", None))


def _activated_linear(
    linear_factory: LinearFactory,
    weights: dict[str, Tensor],
    role: str,
    activation: Gate | Activation,
) -> Linear:
    weight, bias = weights.pop(role), weights.pop(f"{role}_bias", None)
    if isinstance(activation, Gate):
        return linear_factory.make_gated(weight, bias, activation)
    return linear_factory.make_activated(weight, bias, activation)
