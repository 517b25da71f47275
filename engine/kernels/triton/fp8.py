"""Matrix products of fp8 activations and fp8 weights, and quantisation of rows to fp8 (Ada, …).

The reference is `engine.kernels.quantised`: `rows_to_fp8`, and `Quantised.dequantised` with it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import BLOCK, FP8, Quantised
from .fp8_bits import LARGEST, as_e4m3
from .launch import arch_of, launch
from .tuned_tiles import config_for

# fp8 tensor cores, and Triton's fp8 type, exist from Ada on.
FIRST_ARCH = 89
# Rows that a program may have, by how many there are.
TILES = (16, 64, 128)
STEP = tl.constexpr(BLOCK)


def has_fp8_matmul(device: torch.device) -> bool:
    """Say whether a device multiplies fp8 numbers in hardware."""
    arch = arch_of(device)
    return arch == "interpreter" or int(arch.removeprefix("sm_")) >= FIRST_ARCH


def quantise_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return `x [T, I]` as fp8, and fp32 scales `[T, ⌈I / group⌉]`; see `rows_to_fp8`.

    A group is a power of two, or a row. Moves T·I numbers of x's dtype and T·I bytes.
    """
    rows, width = x.shape
    groups = triton.cdiv(width, group)
    numbers = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    arrays = x.contiguous(), numbers.view(torch.uint8), scales
    arch = arch_of(x.device)
    if groups == 1:
        config = config_for("row_to_fp8", arch)
        launch(_row_to_fp8, (rows,), *arrays, width, config=config)
    else:
        config = config_for("groups_to_fp8", arch)
        grid = (rows, triton.cdiv(groups, config.sizes["GROUPS"]))
        launch(_groups_to_fp8, grid, *arrays, width, groups, config=config, SIZE=group)
    return numbers, scales


def multiply(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias for `x [T, I]`, which is made fp8 by the groups of the weight.

    These are blocks of a multiple of 128 inputs, or rows. Moves T·I numbers twice and T·O once of
    x's dtype, and the weight's bytes once for each tile of rows.
    """
    numbers, scales = quantise_fp8(x, weight.group)
    (rows, inputs), outputs, groups = x.shape, weight.shape[0], weight.scales.shape[-1]
    out = x.new_empty(rows, outputs)
    most = next((tile for tile in TILES if rows <= tile), TILES[-1])
    config = config_for("multiply_fp8", arch_of(x.device), rows=most, is_grouped=int(groups > 1))
    tiles = (triton.cdiv(rows, config.sizes["ROWS"]), triton.cdiv(outputs, config.sizes["OUTPUTS"]))
    arrays = numbers, scales, weight.numbers, weight.scales, out
    sizes = rows, outputs, inputs, groups, weight.group // BLOCK
    grid = (tiles[0] * tiles[1],)
    launch(_multiply_fp8, grid, *arrays, *sizes, config=config, IS_GROUPED=groups > 1)
    return out if bias is None else out.add_(bias)


def supports(weight: Quantised) -> bool:
    """Say whether `multiply` takes a weight."""
    is_one = weight.group >= weight.inputs
    return (
        weight.zeros is None
        and len(weight.shape) == 2
        and (is_one or (weight.group % BLOCK == 0 and weight.group.bit_count() == 1))
    )


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
    scale = _scale(tl.max(largest, 0))
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row + column, column < width, other=0.0).to(tl.float32)
        tl.store(numbers + row + column, as_e4m3(value / scale), column < width)


@triton.jit
def _groups_to_fp8(
    x,  # [T, width]
    numbers,  # [T, width], uint8
    scales,  # [T, groups]
    width,
    groups,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    place = row * width + column
    value = tl.load(x + place, column < width, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(value), 1))
    tl.store(numbers + place, as_e4m3(value / scale[:, None]), column < width)
    tl.store(scales + row * groups + group, scale, group < groups)


@triton.jit
def _scale(largest):
    return tl.where(largest > 0, largest / LARGEST, 1.0)


@triton.jit(do_not_specialize=["rows", "groups", "steps_a_group"])
def _multiply_fp8(
    x,  # [T, inputs]
    x_scales,  # [T, groups]
    numbers,  # [outputs, inputs]
    scales,  # [outputs, groups]
    out,  # [T, outputs]
    rows,
    outputs,
    inputs,
    groups,
    steps_a_group,
    IS_GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    # Programs beside each other have the same outputs: a weight is read once from memory.
    row_tiles = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % row_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = (tl.program_id(0) // row_tiles).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row, has_output = row < rows, output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for step in range(tl.cdiv(inputs, STEP)):
        column = step * STEP + tl.arange(0, STEP)
        has_column = column < inputs
        left = tl.load(
            x + row[:, None] * inputs + column[None, :],
            has_row[:, None] & has_column[None, :],
            other=0.0,
        )
        right = tl.load(
            numbers + output[None, :] * inputs + column[:, None],
            has_output[None, :] & has_column[:, None],
            other=0.0,
        )
        if IS_GROUPED:
            group = step // steps_a_group
            of_row = tl.load(x_scales + row * groups + group, has_row, other=0.0)
            of_output = tl.load(scales + output * groups + group, has_output, other=0.0)
            total += tl.dot(left, right) * (of_row[:, None] * of_output[None, :])
        else:
            total = tl.dot(left, right, total)
    if not IS_GROUPED:
        of_row = tl.load(x_scales + row, has_row, other=0.0)
        of_output = tl.load(scales + output, has_output, other=0.0)
        total *= of_row[:, None] * of_output[None, :]
    tl.store(
        out + row[:, None] * outputs + output[None, :],
        total.to(out.dtype.element_ty),
        has_row[:, None] & has_output[None, :],
    )
