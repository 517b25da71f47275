"""What a block computes between its products, in torch: the reference, on any device.

Every function takes packed tokens, one a row. What is summed or turned is so in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import AttentionShape, HeadNorms

# "silu" is x · sigmoid(x), "gelu" is by the error function, "gelu_tanh" what comes close to it.
Curve = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class Gate:
    """What joins the halves of an MLP: curve(gate) · (up + `lift`).

    The curve "silu" is x · sigmoid(`steepness` · x). Before, with a `limit`, the gate is cut off
    above it and up on both sides. With other curves all other fields are as they are by default.
    """

    curve: Curve = "silu"
    steepness: float = 1.0
    limit: float | None = None
    lift: float = 0.0


class Blocks(Protocol):
    """These functions for one kind of device."""

    def norm_weight(self, stored: Tensor, offset: float) -> Tensor:
        """Return what the norms here multiply by: the weight and what its family adds to it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / rms(x) · weight over the last axis: `x […, H]`, `weight [H]` → `[…, H]`."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x [T, H]` to `residual [T, H]`, in place, and return the norm of the sum."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Return the norm of `x [T, H]` by mean and variance, times `weight [H]`, plus `bias`.

        Weight and bias are as `norm_weight` gives them.
        """

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Add `x [T, H]` to `residual [T, H]`, in place, and return the `layer_norm` of the sum."""

    def gated(self, both: Tensor, gate: Gate) -> Tensor:
        """Join gate and up that lie side by side: `both [T, 2·I]` → `[T, I]`."""


def norm_weight(stored: Tensor, offset: float) -> Tensor:
    """See `Blocks.norm_weight`: added to what is widened, as bf16 has no room for most sums."""
    return stored.float() + offset if offset else stored


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Blocks.rms_norm`."""
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Blocks.add_rms_norm`."""
    return rms_norm(residual.add_(x), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Blocks.layer_norm`."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Blocks.add_layer_norm`."""
    return layer_norm(residual.add_(x), weight, bias, eps)


def curved(x: Tensor, curve: Curve) -> Tensor:
    """Return a curve of every number."""
    if curve == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if curve == "gelu_tanh" else "none")


def gated(both: Tensor, gate: Gate) -> Tensor:
    """See `Blocks.gated`."""
    x, up = both.chunk(2, dim=-1)
    if gate == Gate(gate.curve):
        return curved(x, gate.curve) * up
    x, up = x.float(), up.float()
    if gate.limit is not None:
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (x * torch.sigmoid(gate.steepness * x) * (up + gate.lift)).to(both.dtype)


def turns(positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """Return the cosines and sines of packed tokens, `[T, 2·R]` fp32: less work than a table.

    Their `positions [T, 1]` are the same for all frequencies, or `[T, R]` those of each.
    """
    angles = positions.float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * scale


def turned(
    qkv: Tensor, turns: Tensor, shape: AttentionShape, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, norm and turn: see `AttentionBackend.enter`."""
    heads = qkv.view(qkv.shape[0], -1, shape.key_dim)
    counts = [shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads]
    query, key, value = torch.split(heads, counts, dim=1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps)
        key = rms_norm(key, norms.key, norms.eps)
    return _turned(query, turns), _turned(key, turns), value


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Turn the first numbers of every head: `[T, H, D]`, `[T, 2·R]` → `[T, H, D]`."""
    half = turns.shape[1] // 2
    cos, sin = turns[:, None].chunk(2, dim=-1)  # [T, 1, R]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(heads.dtype) for part in parts), heads[..., 2 * half :]], dim=-1)
