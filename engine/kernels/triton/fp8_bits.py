"""Conversion of fp8 (float8_e4m3fn) and fp4 (e2m1) bit by bit, for GPUs without those types.

It is also used by Triton's interpreter, whose own conversion rounds differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantised import EXPONENT_SHIFT, FP8_MAX

LARGEST = tl.constexpr(FP8_MAX)
# Numbers below it are subnormal: multiples of 2**-9, the last bit of the number added to round.
LOWEST_NORMAL = tl.constexpr(0.015625)
ROUNDS_SUBNORMAL = tl.constexpr(16384.0)
BITS_OF_ROUNDING = tl.constexpr(0x46800000)
# fp16 numbers with the same bits are smaller by this factor.
OF_HALVES = tl.constexpr(256.0)
# The same for fp4, as a power of two; and the position of the exponent in fp32, with e8m0's bias.
OF_FP4_HALVES, EXPONENT = tl.constexpr(14), tl.constexpr(EXPONENT_SHIFT)
OF_SCALE_HALVES = tl.constexpr(256.0 * 2**14)


@triton.jit
def as_e4m3(numbers):
    """Return fp32 numbers rounded to fp8 bytes, ties to even; larger ones saturate, NaN stays."""
    size = tl.abs(numbers)
    bits = size.to(tl.int32, bitcast=True)
    is_nan = bits > 0x7F800000
    size = tl.where(size > LARGEST, LARGEST, size)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of the mantissa stay, and the part of the exponent above -7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (size + ROUNDS_SUBNORMAL).to(tl.int32, bitcast=True) - BITS_OF_ROUNDING
    code = tl.where(size < LOWEST_NORMAL, subnormal, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((numbers.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_of(largest):
    """Return the scale by which a group's largest number becomes the largest of fp8."""
    return tl.where(largest > 0, largest / LARGEST, 1.0)


@triton.jit
def store_fp8(
    value,  # [BLOCK], fp32; 0 after the last column
    numbers,  # [T, width], uint8
    scales,  # [groups, padded_rows]
    row,
    start,
    width,
    padded_rows,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store columns of a row from `start` on as fp8, with the scales of their groups."""
    grouped = tl.reshape(value, (BLOCK // GROUP, GROUP))
    scale = scale_of(tl.max(tl.abs(grouped), 1))
    code = tl.reshape(as_e4m3(grouped / scale[:, None]), (BLOCK,))
    column = start + tl.arange(0, BLOCK)
    tl.store(numbers + row * width + column, code, column < width)
    group = start // GROUP + tl.arange(0, BLOCK // GROUP)
    tl.store(scales + group.to(tl.int64) * padded_rows + row, scale, group * GROUP < width)


@triton.jit
def halves_of_e4m3(numbers):
    """Convert bytes to fp16 that is `OF_HALVES` times too small; NaN becomes 1.875."""
    bits = numbers.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def halves_of_e2m1(codes):
    """Convert codes of four bits to fp16 that is `2 ** OF_FP4_HALVES` times too small."""
    bits = codes.to(tl.int16)
    return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def scales_for_halves(scales, of_rows):
    """Return scales in fp32: those of fp4 are `2 ** OF_FP4_HALVES` times too large.

    Bytes are e4m3, as multiples of scales `of_rows`, or e8m0 without those.
    """
    if of_rows is not None:
        widened = halves_of_e4m3(scales).to(tl.float32) * OF_SCALE_HALVES * of_rows
    elif scales.dtype == tl.uint8:
        powers = scales.to(tl.int32) + OF_FP4_HALVES
        widened = (powers << EXPONENT).to(tl.float32, bitcast=True)
    else:
        widened = scales
    return widened
