"""Norms, gated activations and rotary embeddings in torch: the reference, on any device.

Every function takes packed tokens, one per row. Sums and rotations are computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .attention import AttentionShape, HeadNorms

# "silu" is x · sigmoid(x), "gelu" uses the error function, "gelu_tanh" and "gelu_sigmoid" are its
# approximations, "relu2" is relu(x)²; "xielu" has learned numbers, and a separate function.
Activation = Literal["silu", "gelu_tanh", "gelu_sigmoid", "gelu", "relu", "relu2", "xielu"]
SIGMOID_SLOPE = 1.702
"""gelu_sigmoid is x · sigmoid(1.702 · x), as in OpenAI's CLIP."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Gated activation of an MLP (SwiGLU, GeGLU): activation(gate) · (up + `beta`).

    The activation "silu" is x · sigmoid(`alpha` · x). With a `limit`, first the gate is clamped
    above it and up on both sides. With other activations all other fields keep their defaults.
    """

    activation: Activation = "silu"
    alpha: float = 1.0
    limit: float | None = None
    beta: float = 0.0


class ElementwiseOps(Protocol):
    """Elementwise operations of one kind of device."""

    def norm_weight(self, stored: Tensor, offset: float) -> Tensor:
        """Return the factor of the norms: the stored weight plus its family's offset."""

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

    def act_and_mul(self, both: Tensor, gate: Gate) -> Tensor:
        """Activate the gate and multiply by up, which are side by side: `[T, 2·I]` → `[T, I]`."""


class Norm(NamedTuple):
    """RMSNorm by a weight `[H]`, or LayerNorm with a bias; both as `norm_weight` gives them."""

    ops: ElementwiseOps
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x [T, H]`."""
        if self.bias is None:
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add `x [T, H]`, None being 0, to `residual [T, H]`, in place; return the sum's norm."""
        if x is None:
            return self(residual)
        if self.bias is None:
            return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


def norm_weight(stored: Tensor, offset: float) -> Tensor:
    """See `ElementwiseOps.norm_weight`: the sum is fp32, as bf16 would round most sums away."""
    return stored.float() + offset if offset else stored


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.rms_norm`."""
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.add_rms_norm`."""
    return rms_norm(residual.add_(x), weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.layer_norm`."""
    wide = x.to(weight.dtype)
    return functional.layer_norm(wide, weight.shape, weight, bias.to(weight.dtype), eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.add_layer_norm`."""
    return layer_norm(residual.add_(x), weight, bias, eps)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to every number."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_sigmoid":
        return x * torch.sigmoid(SIGMOID_SLOPE * x)
    if activation in ("relu", "relu2"):
        return functional.relu(x) if activation == "relu" else functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of every number, on a CPU by its exponential.

    There torch computes the last few numbers of a tensor in another way, to other bits.
    """
    if x.device.type != "cpu":
        return x.sigmoid()
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Apply xIELU: a parabola above 0, and an integral of ELU below, of learned steepness.

    All but `x` are one number in fp32.
    """
    wide = x.float()
    above = alpha_p * wide * wide
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * alpha_n
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


def act_and_mul(both: Tensor, gate: Gate) -> Tensor:
    """See `ElementwiseOps.act_and_mul`."""
    x, up = both.chunk(2, dim=-1)
    if gate == Gate(gate.activation):
        return activate(x, gate.activation) * up
    x, up = x.float(), up.float()
    if gate.limit is not None:
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (x * torch.sigmoid(gate.alpha * x) * (up + gate.beta)).to(both.dtype)


def rotary_cos_sin(positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """Return the rotary cosines and sines of packed tokens, `[T, 2·R]` fp32: cheaper than a table.

    Their `positions [T, 1]` are the same for all frequencies, or `[T, R]` those of each (M-RoPE).
    """
    angles = positions.float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1) * scale


def qk_norm_rope(
    qkv: Tensor, rotary_cos_sin: Tensor, shape: AttentionShape, norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv, norm heads (QK norm) and apply RoPE: see `AttentionBackend.store_qkv`."""
    heads = qkv.view(qkv.shape[0], -1, shape.key_dim)
    counts = [shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads]
    query, key, value = torch.split(heads, counts, dim=1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.eps)
        key = rms_norm(key, norms.key, norms.eps)
    return apply_rotary(query, rotary_cos_sin), apply_rotary(key, rotary_cos_sin), value


def apply_rotary(heads: Tensor, rotary_cos_sin: Tensor) -> Tensor:
    """Rotate the first 2·R numbers of every head: `[T, H, D]`, `[T, 2·R]` → `[T, H, D]`."""
    half = rotary_cos_sin.shape[1] // 2
    cos, sin = rotary_cos_sin[:, None].chunk(2, dim=-1)  # [T, 1, R]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(heads.dtype) for part in parts), heads[..., 2 * half :]], dim=-1)
