"""Norms and gated activations on GPUs, and quantisation of activations to fp8.

The references are `engine.kernels.elementwise` and, for their outputs, `quantise_rows_fp8`.
Arithmetic is fp32; each number is read once, except for rows that are quantised alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import elementwise
from ..elementwise import Gate
from ..quantised import FP8, Fp8Rows
from .fp8_bits import as_e4m3, scale_of, store_fp8
from .launch import arch_of, cdiv, launch, next_power_of_2
from .tuned_tiles import KernelConfig, config_for

norm_weight = elementwise.norm_weight
# gelu's tanh as a sigmoid: x · sigmoid(2·√(2/π) · (x + 0.044715·x³)).
GELU_SLOPE = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)
ROOT_OF_HALF = tl.constexpr(0.7071067811865476)
# Rows up to this length are gated and quantised by one program, in registers; the error function
# needs some registers, too.
MAX_GATED_ROW, MAX_ERF_ROW = 32768, 16384
# Grouped rows and their scales are padded to a multiple of this: cuBLAS reads 16 bytes at once.
PADDED_TO = 16


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
    rows = _rows_of(both)
    width = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], width)
    config = config_for("gated", arch_of(both.device), width=width)
    _launch_gate(rows, out, None, gate, config, group=0)
    return out if both.ndim == 2 else out.view(*both.shape[:-1], width)


def quantise_fp8(x: Tensor, group: int) -> Fp8Rows:
    """See `Fp8Ops.quantise_fp8`; moves T·I numbers of x's dtype, of whole rows twice, and bytes."""
    width = x.shape[1]
    out, arch = _empty_fp8(x, width, group), arch_of(x.device)
    arrays = x.contiguous(), out.numbers.view(torch.uint8), out.scales
    if group >= width:
        config = config_for("row_to_fp8", arch)
        launch(_row_to_fp8, (len(x),), *arrays, width, config=config)
    else:
        config = config_for("groups_to_fp8", arch)
        columns = max(config.sizes["BLOCK"], group)
        grid = (len(x), cdiv(width, columns))
        config = replace(config, sizes={"BLOCK": columns})
        launch(
            *(_groups_to_fp8, grid, *arrays, width, out.scales.shape[1]),
            config=config, GROUP=group,
        )  # fmt: skip
    return out


def add_rms_norm_fp8(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, group: int
) -> Fp8Rows:
    """See `Fp8Ops.add_rms_norm_fp8`; moves 3·T·H numbers of x's dtype, T·H bytes, the weight."""
    width = residual.shape[1]
    out = _empty_fp8(residual, width, group)
    first, second = (residual, None) if x is None else (x.contiguous(), residual)
    assert residual.is_contiguous()
    _launch_norm(first, second, weight, None, eps, out.numbers.view(torch.uint8), out.scales, group)
    return out


def act_and_mul_fp8(both: Tensor, gate: Gate, group: int) -> Fp8Rows:
    """See `Fp8Ops.act_and_mul_fp8`; moves 2·T·I numbers of its dtype and T·I bytes."""
    width, arch = both.shape[1] // 2, arch_of(both.device)
    block = next_power_of_2(width)
    if group < width:
        config = config_for("gated", arch, width=width)
        block = max(config.sizes["BLOCK"], group)
    elif block <= (MAX_ERF_ROW if gate.activation == "gelu" else MAX_GATED_ROW):
        config = config_for("gated_row", arch, block=block)
    else:
        return quantise_fp8(act_and_mul(both, gate), group)
    out = _empty_fp8(both, width, group)
    config = replace(config, sizes={"BLOCK": block})
    group = group if group < width else block
    _launch_gate(both.contiguous(), out.numbers.view(torch.uint8), out.scales, gate, config, group)
    return out


def _empty_fp8(x: Tensor, width: int, group: int) -> Fp8Rows:
    """Allocate x's rows with a given width, padded if they have groups; see `Fp8Rows`."""
    rows, groups = len(x), cdiv(width, group)
    padded = rows if groups == 1 else -(-rows // PADDED_TO) * PADDED_TO
    numbers = torch.empty(padded, width, dtype=FP8, device=x.device)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    return Fp8Rows(numbers, scales, rows, x.dtype)


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    rows = _rows_of(x)
    out = torch.empty_like(rows)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    _launch_norm(rows, residual, weight, bias, eps, out, None, 0)
    return out if x.ndim == 2 else out.view(*x.shape)


def _rows_of(x: Tensor) -> Tensor:
    """Return `x […, H]` as contiguous rows `[T, H]`; a view takes as long as a launch."""
    return (x if x.ndim == 2 else x.reshape(-1, x.shape[-1])).contiguous()


def _launch_norm(
    rows: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    scales: Tensor | None,
    group: int,
) -> None:
    width = rows.shape[1]
    block = next_power_of_2(width)
    padded_rows = None if scales is None else scales.shape[1]
    launch(
        *(_norm, (rows.shape[0],)),
        *(rows, residual, weight, bias, out, scales, width, padded_rows, eps),
        config=config_for("norm", arch_of(rows.device), width=width),
        BLOCK=block, GROUP=group if group < width else block,
    )  # fmt: skip


def _launch_gate(
    rows: Tensor, out: Tensor, scales: Tensor | None, gate: Gate, config: KernelConfig, group: int
) -> None:
    width = rows.shape[1] // 2
    padded_rows = None if scales is None else scales.shape[1]
    launch(
        *(_gate, (rows.shape[0], cdiv(width, config.sizes["BLOCK"]))),
        *(rows, out, scales, width, padded_rows),
        config=config, CURVE=gate.activation, GROUP=group,
        STEEPNESS=gate.alpha, LIMIT=gate.limit, LIFT=gate.beta,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padded_rows"])
def _norm(
    x,  # [T, width]
    residual,  # the same, or None
    weight,  # [width]
    bias,  # [width], or None for an RMS norm
    out,  # [T, width]; uint8 where it becomes fp8
    scales,  # [groups, padded_rows] of fp8, or None
    width,
    padded_rows,
    eps,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
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
    normed = normed.to(x.dtype.element_ty)
    if scales is None:
        tl.store(out + row + columns, normed, is_there)
    else:
        index, normed = tl.program_id(0).to(tl.int64), normed.to(tl.float32)
        store_fp8(normed, out, scales, index, 0, width, padded_rows, GROUP, BLOCK)


@triton.jit(do_not_specialize=["padded_rows"])
def _gate(
    both,  # [T, 2 · width]
    out,  # [T, width]; uint8 where it becomes fp8
    scales,  # [groups, padded_rows] of fp8, or None
    width,
    padded_rows,
    CURVE: tl.constexpr,
    STEEPNESS: tl.constexpr,
    LIMIT: tl.constexpr,
    LIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Join some columns of one row."""
    index, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    row = index * width
    columns = start + tl.arange(0, BLOCK)
    is_there = columns < width
    gate = tl.load(both + 2 * row + columns, is_there, other=0.0).to(tl.float32)
    up = tl.load(both + 2 * row + width + columns, is_there, other=0.0).to(tl.float32)
    joined = gated(gate, up, CURVE, STEEPNESS, LIMIT, LIFT)
    joined = joined.to(both.dtype.element_ty)
    if scales is None:
        tl.store(out + row + columns, joined, is_there)
    else:
        joined = joined.to(tl.float32)
        store_fp8(joined, out, scales, index, start, width, padded_rows, GROUP, BLOCK)


@triton.jit
def _row_to_fp8(
    x,  # [T, width]
    numbers,  # [T, width], uint8
    scales,  # [T]
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, column < width, other=0.0).to(tl.float32)
        tl.store(numbers + row + column, as_e4m3(value / scale), column < width)


@triton.jit(do_not_specialize=["padded_rows"])
def _groups_to_fp8(
    x,  # [T, width]
    numbers,  # [T, width], uint8
    scales,  # [groups, padded_rows]
    width,
    padded_rows,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = start + tl.arange(0, BLOCK)
    value = tl.load(x + row * width + column, column < width, other=0.0).to(tl.float32)
    store_fp8(value, numbers, scales, row, start, width, padded_rows, GROUP, BLOCK)


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
        # This form preserves NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if CURVE == "gelu":
        part = 0.5 + 0.5 * tl.erf(gate * ROOT_OF_HALF)
    elif CURVE == "gelu_tanh":
        part = tl.sigmoid((gate + gate * gate * gate * GELU_CUBE) * GELU_SLOPE)
    else:
        part = tl.sigmoid(gate * STEEPNESS)
    return gate * part * (up + LIFT)
