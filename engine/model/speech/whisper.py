"""Whisper network: windows of features → encoder states; states and tokens → logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.attention import AttentionBackend
from ...kernels.backends import choose_elementwise, choose_linear
from ...kernels.elementwise import ElementwiseOps
from ...kernels.linear import Linear, LinearFactory
from ...kernels.step import Step
from .architecture import EPS, KERNEL, STRIDE, SpeechArchitecture


@dataclass(frozen=True, slots=True)
class WhisperLayerNorm:
    """A layer norm's weight and bias, `[H]` each."""

    blocks: ElementwiseOps
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x [T, H]`."""
        return self.blocks.layer_norm(x, self.weight, self.bias, EPS)

    def add_norm(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual`, in place, and return the norm of the sum."""
        return self.blocks.add_layer_norm(x, residual, self.weight, self.bias, EPS)


@dataclass(frozen=True, slots=True)
class WhisperEncoderLayer:
    """One layer of the encoder; `mlp` is all of it."""

    qkv_proj: Linear
    o_proj: Linear
    final_layer_norm: WhisperLayerNorm
    mlp: Linear


@dataclass(frozen=True, slots=True)
class WhisperDecoderLayer:
    """One layer of the decoder: it attends to its text, then to the window."""

    qkv_proj: Linear
    o_proj: Linear
    cross_attn_layer_norm: WhisperLayerNorm
    cross_q_proj: Linear
    cross_kv_proj: Linear
    cross_o_proj: Linear
    final_layer_norm: WhisperLayerNorm
    mlp: Linear


class WhisperModel:
    """An encoder and a decoder of weights by role, which it takes out of the dict."""

    def __init__(self, architecture: SpeechArchitecture, weights: dict[str, Tensor]) -> None:
        self.architecture = architecture
        self.num_layers_started = 0
        self._encoder_positions = weights.pop("encoder.embed_positions")
        embedding = weights.pop("decoder.embed_tokens")
        self._decoder_positions = weights.pop("decoder.embed_positions")
        self.dtype, self.device = embedding.dtype, embedding.device
        blocks = choose_elementwise(self.dtype, self.device)
        linear_factory = choose_linear(blocks, self.device)
        maker = _LayerMaker(blocks, linear_factory, weights)
        self._embed, self._head, _ = linear_factory.make_head(
            embedding, weights.pop("decoder.proj_out", None)
        )
        self._convolutions = [maker.curved(f"encoder.conv{number}") for number in (1, 2)]
        self._encoder = [
            maker.encoder_layer(f"encoder.{index}.") for index in range(architecture.encoder_layers)
        ]
        self._decoder = [
            maker.decoder_layer(f"decoder.{index}.") for index in range(architecture.decoder_layers)
        ]
        # The norms before the first layer and after each: the next one's norm, and the last.
        self._encoder_norms = maker.norms("encoder", architecture.encoder_layers)
        self._decoder_norms = maker.norms("decoder", architecture.decoder_layers)
        self.needs_torch = linear_factory.needs_torch

    def encode(self, features: Tensor, attention: AttentionBackend) -> Tensor:
        """Return the states of windows, `[W, mels, frames]` → `[W, S, H]`.

        `attention` has one layer, by which all attend in turn, and was prepared for the windows.
        """
        model, windows = self.architecture, len(features)
        assert features.shape[1:] == (model.num_mels, model.window_frames), features.shape
        x = features.to(self.dtype).transpose(1, 2)
        for product, stride in zip(self._convolutions, (1, STRIDE), strict=True):
            x = product(_framed(x, stride)).view(windows, -1, model.hidden_size)
        residual = (x + self._encoder_positions).flatten(0, 1)  # [W·S, H]
        x = self._encoder_norms[0](residual)
        for layer, next_norm in zip(self._encoder, self._encoder_norms[1:], strict=True):
            self.num_layers_started += 1
            query = attention.store_qkv(0, layer.qkv_proj(x), self._no_rotary(x), None)
            x = layer.o_proj(attention.attend(0, query).flatten(1))
            x = layer.mlp(layer.final_layer_norm.add_norm(x, residual))
            x = next_norm.add_norm(x, residual)
        return x.view(windows, model.max_source_positions, model.hidden_size)

    def store_cross_attention(self, states: Tensor, cross: AttentionBackend) -> None:
        """Write each layer's keys and values of `states [W·S, H]` to the pages of `cross`.

        It was prepared for these as tokens.
        """
        heads = self.architecture.decoder_heads
        for index, layer in enumerate(self._decoder):
            key, value = layer.cross_kv_proj(states).view(len(states), 2, heads, -1).unbind(1)
            cross.store(index, key.contiguous(), value.contiguous())

    def decode(
        self,
        step: Step,
        own: AttentionBackend,
        cross: AttentionBackend,
        queries: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step of tokens → logits `[N, V]` of its rows; see `hidden_states`."""
        return self.compute_logits(self.hidden_states(step, own, cross, queries))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[N, V]` of the last hidden states `[N, H]`."""
        return self._head(hidden)

    def hidden_states(
        self,
        step: Step,
        own: AttentionBackend,
        cross: AttentionBackend,
        queries: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one step of tokens except for the head → the last hidden states `[N, H]` of its rows.

        `own` was prepared for the step, `cross` for its tokens as ones of their windows. `queries`
        gets the layers' queries of the windows, `[T, heads, D]`, for the layers that it names.
        """
        heads = self.architecture.decoder_heads
        residual = self._embed(step.token_ids) + self._decoder_positions[step.positions]
        tokens = len(residual)
        x = self._decoder_norms[0](residual)
        for index, (layer, next_norm) in enumerate(
            zip(self._decoder, self._decoder_norms[1:], strict=True)
        ):
            self.num_layers_started += 1
            query = own.store_qkv(index, layer.qkv_proj(x), self._no_rotary(x), None)
            x = layer.o_proj(own.attend(index, query).flatten(1))
            x = layer.cross_q_proj(layer.cross_attn_layer_norm.add_norm(x, residual)).view(
                tokens, heads, -1
            )
            if queries is not None and index in queries:
                queries[index] = x
            x = layer.cross_o_proj(cross.attend(index, x).flatten(1))
            x = layer.mlp(layer.final_layer_norm.add_norm(x, residual))
            x = next_norm.add_norm(x, residual)
        return x[step.logit_rows]

    def cross_attentions(
        self, queries: Mapping[int, Tensor], states: Tensor, looking: tuple[tuple[int, int], ...]
    ) -> Tensor:
        """Return the attention of (layer, head) pairs `looking` → softmax `[A, T, S]` in fp32.

        `queries` are those of `decode`, `states [S, H]` the window's.
        """
        heads = self.architecture.decoder_heads
        width = self.architecture.hidden_size // heads
        parts = []
        for index, head in looking:
            keys = self._decoder[index].cross_kv_proj(states).view(len(states), 2, heads, width)
            scores = queries[index][:, head].float() @ keys[:, 0, head].float().T
            parts.append((scores * width**-0.5).softmax(dim=-1))
        return torch.stack(parts)

    def _no_rotary(self, x: Tensor) -> Tensor:
        """Return the rotations of tokens whose positions were added: none, `[T, 0]`."""
        return torch.empty(len(x), 0, device=self.device)


def _framed(x: Tensor, stride: int) -> Tensor:
    """Return the input of each position of a convolution, `[W, T, I]` → `[W · T / stride, 3·I]`."""
    windows, frames, width = x.shape
    padded = functional.pad(x, (0, 0, KERNEL // 2, KERNEL // 2))
    shape = (windows, frames // stride, KERNEL * width)
    strides = (padded.stride(0), stride * width, 1)
    return padded.contiguous().as_strided(shape, strides).reshape(-1, KERNEL * width)


class _LayerMaker:
    """Builds layers from weights, which it takes out of the dict."""

    def __init__(
        self, blocks: ElementwiseOps, linear_factory: LinearFactory, weights: dict[str, Tensor]
    ) -> None:
        self._ops = blocks
        self._linear_factory = linear_factory
        self._weights = weights

    def encoder_layer(self, role: str) -> WhisperEncoderLayer:
        """Return the encoder layer whose roles begin with `prefix`."""
        return WhisperEncoderLayer(
            qkv_proj=self._linear(f"{role}qkv_proj"),
            o_proj=self._linear(f"{role}o_proj"),
            final_layer_norm=self._norm(f"{role}final_layer_norm"),
            mlp=self._mlp(role),
        )

    def decoder_layer(self, role: str) -> WhisperDecoderLayer:
        """Return the decoder layer whose roles begin with `prefix`."""
        return WhisperDecoderLayer(
            qkv_proj=self._linear(f"{role}qkv_proj"),
            o_proj=self._linear(f"{role}o_proj"),
            cross_attn_layer_norm=self._norm(f"{role}cross_attn_layer_norm"),
            cross_q_proj=self._linear(f"{role}cross_q_proj"),
            cross_kv_proj=self._linear(f"{role}cross_kv_proj"),
            cross_o_proj=self._linear(f"{role}cross_o_proj"),
            final_layer_norm=self._norm(f"{role}final_layer_norm"),
            mlp=self._mlp(role),
        )

    def norms(self, side: str, num_layers: int) -> list[WhisperLayerNorm]:
        """Return the norms before each layer of a side, and the one after the last."""
        roles = [
            *(f"{side}.{index}.self_attn_layer_norm" for index in range(num_layers)),
            f"{side}.layer_norm",
        ]
        return [self._norm(role) for role in roles]

    def curved(self, role: str) -> Linear:
        """Return a product whose output goes through GELU."""
        weight, bias = self._weights.pop(role), self._weights.pop(f"{role}_bias")
        return self._linear_factory.make_activated(weight, bias, "gelu")

    def _mlp(self, role: str) -> Linear:
        up, down = self.curved(f"{role}fc1"), self._linear(f"{role}fc2")
        return lambda x: down(up(x))

    def _linear(self, role: str) -> Linear:
        return self._linear_factory.make(self._weights.pop(role), self._weights.pop(f"{role}_bias"))

    def _norm(self, role: str) -> WhisperLayerNorm:
        weight, bias = (
            self._ops.norm_weight(self._weights.pop(name), 0.0) for name in (role, f"{role}_bias")
        )
        return WhisperLayerNorm(self._ops, weight, bias)
