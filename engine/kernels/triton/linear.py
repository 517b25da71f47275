"""Linear layers with quantised weights (int4, fp4, fp8) on GPUs; the reference is `Quantised`.

The weight is dequantised in registers (weight-only quantisation, split-k), so that few bits are
read. For many rows, where one pass over the weight is cheap compared with the product, it is
dequantised first. If the device multiplies fp8, rows are quantised to fp8, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..linear import Fp8Linear, Linear
from ..quantised import BLOCK, WORDS_A_BLOCK, Fp8Rows, Quantised, bytes_of
from . import block_scaled, elementwise, fp8, split_k
from .fp8_bits import OF_HALVES, halves_of_e2m1, halves_of_e4m3, scales_for_halves
from .launch import arch_of, cdiv, launch
from .tuned_tiles import config_for

# Rows of a program, by their total number.
TILES = (16, 64, 128)
# From a tile of this many rows on, a weight is scaled before the product, not the sums after it;
# for fp8, whose numbers take twice the registers, above a few.
FEW, WIDE = tl.constexpr(16), tl.constexpr(128)
# Inputs of one such product: a program's registers hold no more dequantised weights.
PART = tl.constexpr(32)
# Enough programs to fill any GPU, or one wide program per multiprocessor: split-k makes them.
MANY_PROGRAMS = 512
MANY_WIDE_PROGRAMS = 128
# torch._scaled_mm requires both sides of a weight to be multiples of this.
ALIGNED = 16
STEP, WORDS, PLACES = tl.constexpr(BLOCK), tl.constexpr(WORDS_A_BLOCK), tl.constexpr(8)


def prepare(weight: Quantised, bias: Tensor | None) -> Linear | None:
    """Prepare the layer of a quantised weight; None if the kernels do not support it."""
    if len(weight.shape) != 2 or not supports(weight):
        return None
    order, most = weight.order, most_rows(weight)

    def product(x: Tensor) -> Tensor:
        x = x if order is None else x[:, order]
        if len(x) <= most:
            return multiply(x.contiguous(), weight, bias)
        return functional.linear(x, dequantised(weight), bias)

    return product


def prepare_fp8(weight: Quantised, bias: Tensor | None) -> Linear | None:
    """Prepare the layer of fp8 activations; None if that is not supported."""
    if not (fp8.has_fp8_matmul(weight.device) and fp8.supports(weight)):
        return None
    prepared = fp8.prepare(weight)
    of_many = block_scaled.prepare(prepared, weight.dtype)

    def product(x: Fp8Rows) -> Tensor:
        if of_many is None or x.count < block_scaled.MANY_ROWS:
            return fp8.multiply(x, prepared, bias)
        out = of_many(x)
        return out if bias is None else out.add_(bias)

    return Fp8Linear(product, weight.group, elementwise)


def prepare_scaled(weight: Quantised, bias: Tensor | None) -> Linear | None:
    """Prepare the same with torch._scaled_mm, for weights with row scales."""
    sides = [*weight.shape, ALIGNED]
    is_even = all(side % ALIGNED == 0 for side in sides)
    is_row_wise = fp8.supports(weight) and weight.scales.shape[-1] == 1
    if not (is_even and is_row_wise and fp8.has_fp8_matmul(weight.device)):
        return None
    scales = weight.scales.T.contiguous()  # [1, O]

    def product(x: Fp8Rows) -> Tensor:
        out = torch._scaled_mm(  # noqa: SLF001 - the public function takes microseconds more
            x.numbers,
            weight.numbers.T,
            scale_a=x.scales.view(-1, 1),
            scale_b=scales,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return out if bias is None else out.add_(bias)

    return Fp8Linear(product, weight.group, elementwise)


def supports(weight: Quantised) -> bool:
    """Return whether the kernels support a weight's group size."""
    is_one = weight.group >= weight.inputs
    halves = 4 if weight.is_fp8 else BLOCK // WORDS_A_BLOCK
    is_within = BLOCK % weight.group == 0 and BLOCK // weight.group <= halves
    return is_one or weight.group % BLOCK == 0 or is_within


def most_rows(weight: Quantised) -> int:
    """Return the most rows for which `multiply` pays off; for more, dequantise first.

    Wide tiles have one scale for the inputs of a product.
    """
    if groups_of(weight)[1] * PART.value > BLOCK:
        return TILES[-2]
    return config_for("dequantise_first", arch_of(weight.device)).sizes["ROWS"]


def multiply(x: Tensor, weight: Quantised, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: contiguous `x [T, I]`, its columns in the weight's order.

    It takes at most `most_rows`. Moves the weight's bytes once for each tile of rows, x's and out's
    numbers, and with split-k fp32 partial sums.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tile = next((tile for tile in TILES if rows <= tile), TILES[-1])
    config = config_for("multiply", arch_of(x.device), rows=tile, outputs=outputs)
    steps = cdiv(inputs, BLOCK)
    tiles = cdiv(rows, tile), cdiv(outputs, config.sizes["OUTPUTS"])
    programs = MANY_PROGRAMS if tile < WIDE.value else MANY_WIDE_PROGRAMS
    shares, each = split_k.divide(steps, programs // (tiles[0] * tiles[1]))
    out = x.new_empty(rows, outputs)
    into = out if shares == 1 else x.new_empty(shares, rows, outputs, dtype=torch.float32)
    arrays = x, *arrays_of(weight), into
    steps_a_group, groups = groups_of(weight)
    launch(
        *(_multiply, (*tiles, shares), *arrays, rows, outputs, inputs),
        *(weight.numbers.shape[-1], weight.scales.shape[-1], steps_a_group, each),
        config=config, GROUPS=groups, ROWS=tile, IS_EVEN=inputs % BLOCK == 0,
    )  # fmt: skip
    if shares == 1:
        return out if bias is None else out.add_(bias)
    return split_k.join(into, bias, out)


def dequantised(weight: Quantised) -> Tensor:
    """Dequantise a weight, its columns in their stored order; see `Quantised`.

    Moves its bytes, and O·I numbers of its dtype.
    """
    outputs, inputs = weight.shape[:-1].numel(), weight.inputs
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    config = config_for("dequantise", arch_of(weight.device))
    grid = (cdiv(outputs, config.sizes["OUTPUTS"]), cdiv(inputs, BLOCK))
    arrays = *arrays_of(weight), out
    sizes = outputs, inputs, weight.numbers.shape[-1], weight.scales.shape[-1]
    steps_a_group, groups = groups_of(weight)
    launch(_dequantise, grid, *arrays, *sizes, steps_a_group, config=config, GROUPS=groups)
    return out


def arrays_of(weight: Quantised) -> tuple[Tensor | None, ...]:
    """Return a kernel's arrays of a weight: numbers, scales, zeros and row scales.

    fp8 is viewed as uint8, which Ampere supports.
    """
    return bytes_of(weight.numbers), bytes_of(weight.scales), weight.zeros, weight.row_scales


def groups_of(weight: Quantised) -> tuple[int, int]:
    """Return the number of blocks in a group, and of groups in a block."""
    if weight.group >= weight.inputs:
        return cdiv(weight.inputs, BLOCK), 1
    return max(weight.group // BLOCK, 1), max(BLOCK // weight.group, 1)


@triton.jit(do_not_specialize=["rows", "groups", "steps_a_group", "steps_each"])
def _multiply(
    x,  # [T, inputs]
    numbers,  # [outputs, words]: int32, of fp8 uint8
    scales,  # [outputs, groups], of fp4 uint8
    zeros,  # [outputs, groups], of int4
    row_scales,  # [outputs, 1], if scales are fp8
    out,  # [T, outputs]; of more shares than one their parts, [shares, T, outputs]
    rows,
    outputs,
    inputs,
    words,
    groups,
    steps_a_group,
    steps_each,
    GROUPS: tl.constexpr,  # of a step
    IS_EVEN: tl.constexpr,  # whether inputs are whole steps
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    has_row, has_output = row < rows, output < outputs
    first = tl.program_id(2) * steps_each
    last = min(first + steps_each, tl.cdiv(inputs, STEP))
    if ROWS <= FEW or (ROWS < WIDE and numbers.dtype.element_ty == tl.int32):
        total = accumulated(
            *(x, row, has_row, numbers, scales, zeros, row_scales, output, has_output),
            *(first, last),
            *(inputs, words, groups, steps_a_group, GROUPS, ROWS, OUTPUTS),
        )
    else:
        total = accumulated_wide(
            *(x, tl.minimum(row, rows - 1), numbers, scales, zeros, row_scales),
            *(tl.minimum(output, outputs - 1), first, last),
            *(inputs, words, groups, steps_a_group, GROUPS, IS_EVEN, ROWS, OUTPUTS),
        )
    place = (tl.program_id(2).to(tl.int64) * rows + row[None, :]) * outputs + output[:, None]
    is_there = has_row[None, :] & has_output[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), is_there)


@triton.jit
def accumulated(
    x,
    row,  # [ROWS]
    has_row,
    numbers,
    scales,
    zeros,
    row_scales,
    output,  # [OUTPUTS]
    has_output,
    first,
    last,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Return the sums of some steps, `[OUTPUTS, ROWS]`; `_multiply` describes the arguments."""
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    of_rows = _of_outputs(row_scales, output, has_output)
    for step in range(first, last):
        for part in tl.static_range(GROUPS):
            group = step // steps_a_group if GROUPS == 1 else step * GROUPS + part
            has_group = has_output & (group < groups)
            of_group = tl.zeros((OUTPUTS, ROWS), tl.float32)
            if numbers.dtype.element_ty == tl.uint8:
                column = step * STEP + part * (STEP // GROUPS) + tl.arange(0, STEP // GROUPS)
                weight = _of_fp8(numbers, output, has_output, column, inputs, x.dtype.element_ty)
                of_group = tl.dot(weight, _turned(x, row, has_row, column, inputs), of_group)
            else:
                place = output[:, None] * words + step * WORDS + tl.arange(0, WORDS)[None, :]
                held = tl.load(numbers + place, has_output[:, None], other=0)
                zero = _of_outputs(zeros, output * groups + group, has_group)
                for index in tl.static_range(PLACES // GROUPS):
                    which = part * (PLACES // GROUPS) + index
                    column = step * STEP + which * WORDS + tl.arange(0, WORDS)
                    weight = _of_four_bits(held, which, zero, x.dtype.element_ty)
                    of_group = tl.dot(weight, _turned(x, row, has_row, column, inputs), of_group)
            scale = tl.load(scales + output * groups + group, has_group, other=0)
            total += of_group * scales_for_halves(scale, of_rows)[:, None]
    if numbers.dtype.element_ty == tl.uint8:
        total *= OF_HALVES
    return total


@triton.jit
def accumulated_wide(
    x,
    row,  # [ROWS], none after the last
    numbers,
    scales,
    zeros,
    row_scales,
    output,  # [OUTPUTS], the same
    first,
    last,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Return the same sums for many rows, of weights that are rounded as `dequantised` rounds."""
    column = tl.arange(0, PART)
    shift = 4 * tl.arange(0, PART // WORDS)
    held_at = numbers + output[:, None] * words + first * WORDS + tl.arange(0, WORDS)[None, :]
    weight_at = numbers + output[:, None] * inputs + first * STEP + column[None, :]
    x_at = x + row[None, :] * inputs + first * STEP + column[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    of_rows = None if row_scales is None else tl.load(row_scales + output)
    for step in range(first, last):
        if numbers.dtype.element_ty == tl.int32:
            held = tl.load(held_at)
            held_at += WORDS
        for part in tl.static_range(STEP // PART):
            group = step // steps_a_group if GROUPS == 1 else step * GROUPS
            group = tl.minimum(group + part * GROUPS // (STEP // PART), groups - 1)
            scale = scales_for_halves(tl.load(scales + output * groups + group), of_rows)
            is_there = column < inputs - step * STEP - part * PART
            if numbers.dtype.element_ty == tl.uint8:
                code = _loaded(weight_at, is_there[None, :], IS_EVEN)
                weight = halves_of_e4m3(code).to(tl.float32) * OF_HALVES
                weight_at += PART
            else:
                places = held[:, None, :] >> (shift + part * 4 * PART // WORDS)[None, :, None]
                bits = tl.reshape(places & 15, (OUTPUTS, PART))
                if zeros is None:
                    weight = halves_of_e2m1(bits).to(tl.float32)
                else:
                    zero = tl.load(zeros + output * groups + group).to(tl.int32)
                    weight = (bits - zero[:, None]).to(tl.float32)
            weight = (weight * scale[:, None]).to(x.dtype.element_ty)
            total = tl.dot(weight, _loaded(x_at, is_there[:, None], IS_EVEN), total)
            x_at += PART
    return total


@triton.jit
def _of_outputs(numbers, places, is_there):
    """Load zeros of groups, or scales of rows; None if there are none."""
    return None if numbers is None else tl.load(numbers + places, is_there, other=0)


@triton.jit
def _loaded(pointers, is_there, IS_WHOLE: tl.constexpr):
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, is_there, other=0)


@triton.jit
def _turned(x, row, has_row, column, inputs):
    """Return columns of rows, one column per line; 0 after the last."""
    place = row[None, :] * inputs + column[:, None]
    return tl.load(x + place, has_row[None, :] & (column < inputs)[:, None], other=0.0)


@triton.jit
def _of_fp8(numbers, output, has_output, column, inputs, dtype: tl.constexpr):
    """Return fp8 numbers as others, 256 times too small."""
    place = output[:, None] * inputs + column[None, :]
    is_there = has_output[:, None] & (column < inputs)[None, :]
    return halves_of_e4m3(tl.load(numbers + place, is_there, other=0)).to(dtype)


@triton.jit
def _of_four_bits(words, place: tl.constexpr, zero, dtype: tl.constexpr):
    """Return the number at a place of each word: fp4 too small, see above, or int4 less its zero.

    Set into the lowest bits of 1024 or 128 an int4 is a float without any conversion.
    """
    bits = (words >> (4 * place)) & 15
    if zero is None:
        number = halves_of_e2m1(bits).to(dtype)
    elif dtype == tl.float16:
        number = (bits | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        number -= (zero.to(tl.int16) + 1024).to(tl.float16)[:, None]
    elif dtype == tl.bfloat16:
        number = (bits | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        number -= (zero.to(tl.int16) + 128).to(tl.bfloat16)[:, None]
    else:
        number = bits.to(tl.float32) - zero.to(tl.float32)[:, None]
    return number


@triton.jit(do_not_specialize=["groups", "steps_a_group"])
def _dequantise(
    numbers,  # [outputs, words]: int32, of fp8 uint8
    scales,  # [outputs, groups], of fp4 uint8
    zeros,  # [outputs, groups], of int4
    row_scales,  # [outputs, 1], if scales are fp8
    out,  # [outputs, inputs]
    outputs,
    inputs,
    words,
    groups,
    steps_a_group,
    GROUPS: tl.constexpr,  # of a step
    OUTPUTS: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    step = tl.program_id(1)
    has_output = output < outputs
    of_rows = _of_outputs(row_scales, output, has_output)
    for part in tl.static_range(GROUPS):
        group = step // steps_a_group if GROUPS == 1 else step * GROUPS + part
        has_group = has_output & (group < groups)
        scale = tl.load(scales + output * groups + group, has_group, other=0)
        scale = scales_for_halves(scale, of_rows)
        if numbers.dtype.element_ty == tl.uint8:
            column = step * STEP + part * (STEP // GROUPS) + tl.arange(0, STEP // GROUPS)
            weight = _of_fp8(numbers, output, has_output, column, inputs, tl.float32) * OF_HALVES
            _keep(out, weight * scale[:, None], output, has_output, column, inputs)
        else:
            place = output[:, None] * words + step * WORDS + tl.arange(0, WORDS)[None, :]
            held = tl.load(numbers + place, has_output[:, None], other=0)
            zero = _of_outputs(zeros, output * groups + group, has_group)
            for index in tl.static_range(PLACES // GROUPS):
                which = part * (PLACES // GROUPS) + index
                column = step * STEP + which * WORDS + tl.arange(0, WORDS)
                weight = _of_four_bits(held, which, zero, tl.float32)
                _keep(out, weight * scale[:, None], output, has_output, column, inputs)


@triton.jit
def _keep(out, weight, output, has_output, column, inputs):
    place = output[:, None] * inputs + column[None, :]
    is_there = has_output[:, None] & (column < inputs)[None, :]
    tl.store(out + place, weight.to(out.dtype.element_ty), is_there)
