"""Matrix products of fp8 activations and fp8 weights (Ada, Hopper).

The reference is `engine.kernels.quantised`: `quantise_rows_fp8`, and `Quantised.dequantised`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import BLOCK, Fp8Rows, Quantised
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


def multiply(x: Fp8Rows, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, x being quantised by the groups of the weight.

    These are blocks of a multiple of 128 inputs, or rows. Moves T·I bytes, T·O numbers of x's
    dtype, and the weight's bytes once for each tile of rows.
    """
    rows, (outputs, inputs), groups = x.count, weight.shape, weight.scales.shape[-1]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.numbers.device)
    most = next((tile for tile in TILES if rows <= tile), TILES[-1])
    config = config_for("multiply_fp8", arch_of(out.device), rows=most, is_grouped=int(groups > 1))
    tiles = (triton.cdiv(rows, config.sizes["ROWS"]), triton.cdiv(outputs, config.sizes["OUTPUTS"]))
    arrays = x.numbers, x.scales, weight.numbers, weight.scales, out
    sizes = rows, outputs, inputs, x.scales.shape[1], groups, weight.group // BLOCK
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


@triton.jit(do_not_specialize=["rows", "padded_rows", "groups", "steps_a_group"])
def _multiply_fp8(
    x,  # [T, inputs]
    x_scales,  # [groups, padded_rows]
    numbers,  # [outputs, inputs]
    scales,  # [outputs, groups]
    out,  # [T, outputs]
    rows,
    outputs,
    inputs,
    padded_rows,
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
            of_row = tl.load(x_scales + group * padded_rows + row, has_row, other=0.0)
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
