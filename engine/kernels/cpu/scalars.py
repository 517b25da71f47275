"""Scalar intrinsics of the CPU kernels: bfloat16 conversion in registers, e**x, prefetches.

Loops are unrolled by hand where LLVM would not: sums over four rows at once keep the vector units
busy, where one row at a time waits for each sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from torch import Tensor

from .jit_cache import inlined, intrinsic

BITS = ir.IntType(32)
DTYPES = (torch.float32, torch.bfloat16)
EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def elements(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a contiguous CPU tensor as a numpy view: bfloat16 as its uint16 bits, no copy."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def widen(_typing: Any, value: Any) -> Any:
    """Return an element as float32: bfloat16 arrives as its uint16 bits."""
    if value == types.float32:
        return types.float32(types.float32), lambda _context, _builder, _signature, args: args[0]

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], BITS), ir.Constant(BITS, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def narrow(_typing: Any, value: Any, like: Any) -> Any:
    """Return a float32 in the type of `like`: uint16 bits of the nearest bfloat16, ties to even."""
    if like == types.float32:
        return types.float32(value, like), lambda _context, _builder, _signature, args: args[0]

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], BITS)
        odd = builder.and_(builder.lshr(bits, ir.Constant(BITS, 16)), ir.Constant(BITS, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(BITS, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(BITS, 16)), ir.IntType(16))

    return types.uint16(value, like), generate


@intrinsic
def exp(_typing: Any, _value: Any) -> Any:
    """Return e**x for float32 x <= 0 within 2 ulp, e**-87 below -87; libm would not vectorise.

    x = n·ln2 + r with |r| <= ln2/2; e**r by Cephes' polynomial (S. Moshier, expf.c), times 2**n
    through the exponent bits. All lanes stay 32 bits wide: numba's own integers are 64.
    """

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        def constant(value: float) -> ir.Constant:
            return ir.Constant(ir.FloatType(), float(np.float32(value)))

        def multiply_add(a: Any, b: Any, c: Any) -> Any:
            return builder.fadd(builder.fmul(a, b, ("contract",)), c, ("contract",))

        lowest = constant(-87.0)
        is_lower = builder.fcmp_ordered("<", args[0], lowest)
        x = builder.select(is_lower, lowest, args[0])
        half = constant(-0.5)
        n = builder.fptosi(multiply_add(x, constant(1.4426950408889634), half), BITS)
        whole = builder.sitofp(n, ir.FloatType())
        r = multiply_add(whole, constant(-0.693359375), x)
        r = multiply_add(whole, constant(2.12194440e-4), r)
        y = constant(EXP_COEFFICIENTS[0])
        for coefficient in EXP_COEFFICIENTS[1:]:
            y = multiply_add(y, r, constant(coefficient))
        y = multiply_add(builder.fmul(y, r), r, builder.fadd(r, constant(1.0)))
        exponent = builder.shl(builder.add(n, ir.Constant(BITS, 127)), ir.Constant(BITS, 23))
        return builder.fmul(y, builder.bitcast(exponent, ir.FloatType()))

    return types.float32(types.float32), generate


@intrinsic
def order(_typing: Any, value: Any) -> Any:
    """Return an element as an integer of its width with the same order; both zeros are 0.

    A NaN is beyond either infinity.
    """
    kind = {types.float32: types.int32, types.uint16: types.int16}[value]

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(kind.bitwidth)
        bits = builder.bitcast(args[0], word)
        lowest = ir.Constant(word, -(2 ** (kind.bitwidth - 1)))
        is_negative = builder.icmp_signed("<", bits, ir.Constant(word, 0))
        return builder.select(is_negative, builder.sub(lowest, bits), bits)

    return kind(value), generate


@intrinsic
def ordered(_typing: Any, _key: Any) -> Any:
    """Return the float32 whose `order` is the given one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        key = context.cast(builder, args[0], signature.args[0], types.int32)
        lowest = ir.Constant(BITS, -(2**31))
        is_negative = builder.icmp_signed("<", key, ir.Constant(BITS, 0))
        bits = builder.select(is_negative, builder.sub(lowest, key), key)
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(_key), generate


@intrinsic
def magnitude(_typing: Any, value: Any) -> Any:
    """Return the bits of an element without its sign: above those of infinity for NaN."""
    kind = {types.float32: types.int32, types.uint16: types.int16}[value]

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = ir.IntType(kind.bitwidth)
        most = ir.Constant(word, 2 ** (kind.bitwidth - 1) - 1)
        return builder.and_(builder.bitcast(args[0], word), most)

    return kind(value), generate


@intrinsic
def to_byte(_typing: Any, _value: Any) -> Any:
    """Return a float32 of -128 to 127, rounded to even, plus 128 as uint8; any value for NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        # Numbers from 1.5 · 2**23 on have a spacing of one: their last bits are whole numbers.
        shift = ir.Constant(ir.FloatType(), 1.5 * 2**23 + 128)
        bits = builder.bitcast(builder.fadd(args[0], shift), BITS)
        return builder.trunc(bits, ir.IntType(8))

    return types.uint8(types.float32), generate


@intrinsic
def larger(_typing: Any, value: Any, _other: Any) -> Any:
    """Return the larger of two integers of one type, without promoting it."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(">", *args), *args)

    return value(value, value), generate


@intrinsic
def prefetch(_typing: Any, array: Any, page: Any, head: Any, row: Any, column: Any) -> Any:
    """Prefetch the cache line of `array[page, head, row, column]` without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        view = context.make_array(kind)(context, builder, args[0])
        indices = [
            context.cast(builder, value, given, types.intp)
            for value, given in zip(args[1:], signature.args[1:], strict=True)
        ]
        place = cgutils.get_item_pointer(context, builder, kind, view, indices, wraparound=False)
        flags = [ir.Constant(BITS, value) for value in (0, 3, 1)]  # to read, in every level, data
        declared = ir.FunctionType(ir.VoidType(), [place.type, BITS, BITS, BITS])
        call = cgutils.get_or_insert_function(builder.module, declared, "llvm.prefetch.p0")
        builder.call(call, [place, *flags])
        return context.get_dummy_value()

    return types.void(array, page, head, row, column), generate


@inlined
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent in fp32, from `exp`."""
    e = exp(np.float32(-2.0) * abs(x))
    y = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return y if x >= 0 else -y


@inlined
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e**-x) in fp32, from `exp`."""
    e = exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)
