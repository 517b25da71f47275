"""Norms and gated activations on GPUs; the reference is `engine.kernels.elementwise`.

Arithmetic is fp32; each number is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import elementwise
from ..elementwise import Gate
from .launch import arch_of, launch
from .tuned_tiles import config_for

norm_weight = elementwise.norm_weight
# gelu's tanh as a sigmoid: x · sigmoid(2·√(2/π) · (x + 0.044715·x³)).
GELU_SLOPE = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)
ROOT_OF_HALF = tl.constexpr(0.7071067811865476)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.rms_norm`; moves 2·T·H numbers of x's dtype and the weight."""
    return _normed(x, None, weight, None, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.add_rms_norm`; moves 4·T·H numbers of x's dtype and the weight."""
    return _normed(x, residual, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.layer_norm`; moves 2·T·H numbers of x's dtype, weight and bias."""
    return _normed(x, None, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `ElementwiseOps.add_layer_norm`; moves 4·T·H numbers of x's dtype, weight and bias."""
    return _normed(x, residual, weight, bias, eps)


def act_and_mul(both: Tensor, gate: Gate) -> Tensor:
    """See `ElementwiseOps.act_and_mul`, `[…, 2·I]` → `[…, I]`; moves 3·T·I numbers of its dtype."""
    rows = both.reshape(-1, both.shape[-1]).contiguous()
    width = rows.shape[1] // 2
    out = rows.new_empty(len(rows), width)
    config = config_for("gated", arch_of(both.device), width=width)
    grid = (len(rows), triton.cdiv(width, config.sizes["BLOCK"]))
    launch(
        *(_gate, grid, rows, out, width),
        config=config, CURVE=gate.activation,
        STEEPNESS=gate.alpha, LIMIT=gate.limit, LIFT=gate.beta,
    )  # fmt: skip
    return out.view(*both.shape[:-1], width)


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    width = rows.shape[1]
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    config = config_for("norm", arch_of(x.device), width=width)
    block = triton.next_power_of_2(width)
    arrays = rows, residual, weight, bias, out
    launch(_norm, (len(rows),), *arrays, width, eps, config=config, BLOCK=block)
    return out.view(x.shape)


@triton.jit
def _norm(
    x,  # [T, width]
    residual,  # the same, or None
    weight,  # [width]
    bias,  # [width], or None where it is no norm by mean and variance
    out,  # [T, width]
    width,
    eps,
    BLOCK: tl.constexpr,
):
    """Norm one row, in registers."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    is_there = columns < width
    numbers = tl.load(x + row + columns, is_there, other=0.0).to(tl.float32)
    if residual is not None:
        numbers += tl.load(residual + row + columns, is_there, other=0.0).to(tl.float32)
        added = numbers.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, added, is_there)
        numbers = added.to(tl.float32)
    if bias is not None:
        numbers = tl.where(is_there, numbers - tl.sum(numbers, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    normed = numbers * scale * tl.load(weight + columns, is_there, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + columns, is_there, other=0.0).to(tl.float32)
    tl.store(out + row + columns, normed.to(out.dtype.element_ty), is_there)


@triton.jit
def _gate(
    both,  # [T, 2 · width]
    out,  # [T, width]
    width,
    CURVE: tl.constexpr,
    STEEPNESS: tl.constexpr,
    LIMIT: tl.constexpr,
    LIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join some columns of one row."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < width
    gate = tl.load(both + 2 * row + columns, is_there, other=0.0).to(tl.float32)
    up = tl.load(both + 2 * row + width + columns, is_there, other=0.0).to(tl.float32)
    joined = gated(gate, up, CURVE, STEEPNESS, LIMIT, LIFT)
    tl.store(out + row + columns, joined.to(out.dtype.element_ty), is_there)


@triton.jit
def gated(
    gate,
    up,
    CURVE: tl.constexpr,
    STEEPNESS: tl.constexpr,
    LIMIT: tl.constexpr,
    LIFT: tl.constexpr,
):
    """Join fp32 gates with their ups; see `Gate`."""
    if LIMIT is not None:
        # In this form a NaN stays one.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if CURVE == "gelu":
        part = 0.5 + 0.5 * tl.erf(gate * ROOT_OF_HALF)
    elif CURVE == "gelu_tanh":
        part = tl.sigmoid((gate + gate * gate * gate * GELU_CUBE) * GELU_SLOPE)
    else:
        part = tl.sigmoid(gate * STEEPNESS)
    return gate * part * (up + LIFT)
