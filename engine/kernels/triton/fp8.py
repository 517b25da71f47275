"""Matrix products of fp8 activations and fp8 weights (Ada, Hopper).

The reference is `engine.kernels.quantised`: `quantise_rows_fp8`, and `Quantised.dequantised`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import BLOCK, Fp8Rows, Quantised
from . import split_k
from .launch import arch_of, cdiv, launch
from .tuned_tiles import config_for

# fp8 tensor cores, and Triton's fp8 type, exist from Ada on.
FIRST_ARCH = 89
# Rows of a program, by their total number, and the number of programs that fills any GPU.
PROGRAMS = {16: 512, 64: 256, 128: 128}
STEP = tl.constexpr(BLOCK)
# This many tiles of rows run together over all outputs, so that both sides stay in L2.
TILES_OF_ROWS = tl.constexpr(16)


def has_fp8_matmul(device: torch.device) -> bool:
    """Return whether a device multiplies fp8 numbers in hardware."""
    arch = arch_of(device)
    return arch == "interpreter" or int(arch.removeprefix("sm_")) >= FIRST_ARCH


Scaling = Literal["row", "group", "block"]


class Fp8Weight(NamedTuple):
    """Weight `[O, I]` for `multiply`: fp8 numbers, and scales as given by `scaling`."""

    numbers: Tensor  # [O, I]
    scales: Tensor  # [O, groups], or of blocks [⌈O / 128⌉, groups]
    scaling: Scaling
    group: int


def prepare(weight: Quantised) -> Fp8Weight:
    """Return a weight in the supported form; rows that share their block's scales store them once.

    A block's scale saves a step one multiplication per number, and memory 1 byte in 33. The host
    waits for the device; on the meta device the rows of blocks are assumed to share scales.
    """
    scales = weight.scales
    if scales.shape[-1] == 1:
        return Fp8Weight(weight.numbers, scales, "row", weight.group)
    first = scales[::BLOCK].contiguous()
    if first.is_meta or torch.equal(first.repeat_interleave(BLOCK, 0)[: len(scales)], scales):
        return Fp8Weight(weight.numbers, first, "block", weight.group)
    return Fp8Weight(weight.numbers, scales, "group", weight.group)


def multiply(x: Fp8Rows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, x being quantised by the groups of the weight.

    Moves T·I bytes, T·O numbers of x's dtype, the weight's bytes once for each tile of rows, and
    with split-k fp32 partial sums.
    """
    rows, (outputs, inputs), groups = x.count, weight.numbers.shape, weight.scales.shape[-1]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.numbers.device)
    most = next((tile for tile in PROGRAMS if rows <= tile), max(PROGRAMS))
    config = config_for("multiply_fp8", arch_of(out.device), rows=most, scaling=weight.scaling)
    tiles = cdiv(rows, config.sizes["ROWS"]) * cdiv(outputs, config.sizes["OUTPUTS"])
    shares, each = split_k.divide(cdiv(inputs, BLOCK), PROGRAMS[most] // tiles)
    into = out if shares == 1 else out.new_empty(shares, rows, outputs, dtype=torch.float32)
    own_bias = bias if shares == 1 else None
    launch(
        *(_multiply_fp8, (tiles, shares)),
        *(x.numbers, x.scales, weight.numbers, weight.scales, own_bias, into),
        *(rows, outputs, inputs, x.scales.shape[1], groups, weight.group // BLOCK, each),
        config=config, SCALING=weight.scaling, IS_EVEN=inputs % BLOCK == 0,
    )  # fmt: skip
    return out if shares == 1 else split_k.join(into, bias, out)


def supports(weight: Quantised) -> bool:
    """Return whether there is a product with a weight."""
    return len(weight.shape) == 2 and supports_groups(weight)


def supports_groups(weight: Quantised) -> bool:
    """Return whether a weight is fp8 with row scales, or with groups that activations can have."""
    is_one = weight.group >= weight.inputs
    is_power = weight.group % BLOCK == 0 and weight.group.bit_count() == 1
    return weight.is_fp8 and (is_one or is_power)


@triton.jit(do_not_specialize=["rows", "padded_rows", "groups", "steps_a_group", "steps_each"])
def _multiply_fp8(
    x,  # [T, inputs]
    x_scales,  # [groups, padded_rows]
    numbers,  # [outputs, inputs]
    scales,  # [outputs, groups], or of blocks [⌈outputs / 128⌉, groups]
    bias,  # [outputs], or None
    out,  # [T, outputs]; of more shares than one their parts, [shares, T, outputs]
    rows,
    outputs,
    inputs,
    padded_rows,
    groups,
    steps_a_group,
    steps_each,
    SCALING: tl.constexpr,  # by "row", "group" of a row, or "block" of rows
    IS_EVEN: tl.constexpr,  # whether inputs are whole steps
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row_tile, output_tile = _tile(tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS))
    row = row_tile * ROWS + tl.arange(0, ROWS)
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows after the last read the last again, and are not stored.
    from_row = tl.minimum(row, rows - 1).to(tl.int64)
    from_output = tl.minimum(output, outputs - 1).to(tl.int64)
    first = tl.program_id(1) * steps_each
    column = first * STEP + tl.arange(0, STEP)
    left = x + from_row[:, None] * inputs + column[None, :]
    right = numbers + from_output[None, :] * inputs + column[:, None]
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for step in range(first, min(first + steps_each, tl.cdiv(inputs, STEP))):
        if IS_EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            is_there = column < inputs - (step - first) * STEP
            a = tl.load(left, is_there[None, :], other=0.0)
            b = tl.load(right, is_there[:, None], other=0.0)
        left += STEP
        right += STEP
        if SCALING == "row":
            total = tl.dot(a, b, total)
        else:
            group = step // steps_a_group
            of_row = tl.load(x_scales + group * padded_rows + from_row)
            if SCALING == "block":
                of_row *= tl.load(scales + output_tile * OUTPUTS // STEP * groups + group)
                total += tl.dot(a, b) * of_row[:, None]
            else:
                of_output = tl.load(scales + from_output * groups + group)
                total += tl.dot(a, b) * (of_row[:, None] * of_output[None, :])
    if SCALING == "row":
        of_row, of_output = tl.load(x_scales + from_row), tl.load(scales + from_output)
        total *= of_row[:, None] * of_output[None, :]
    if bias is not None:
        total += tl.load(bias + from_output).to(tl.float32)[None, :]
    place = (tl.program_id(1).to(tl.int64) * rows + row[:, None]) * outputs + output[None, :]
    is_there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), is_there)


@triton.jit
def _tile(row_tiles, output_tiles):
    """Return a program's tile of rows and of outputs."""
    band = tl.program_id(0) // (TILES_OF_ROWS * output_tiles)
    place = tl.program_id(0) % (TILES_OF_ROWS * output_tiles)
    height = tl.minimum(row_tiles - band * TILES_OF_ROWS, TILES_OF_ROWS)
    return band * TILES_OF_ROWS + place % height, place // height
