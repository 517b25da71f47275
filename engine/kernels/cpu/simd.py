"""SIMD building blocks: vectors of sixteen numbers in LLVM IR, where auto-vectorising fails.

A number of keys, values and weights is a *word* of 32 bits: one fp32, or two neighbouring bf16,
which are multiplied and added as a pair. Processors with AVX512-BF16 do that in one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .jit_cache import intrinsic
from .scalars import EXP_COEFFICIENTS

LANES = 16

BIT, BYTE, INT, WORD = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
# Reordering and fusing: as `jit_cache.FAST_MATH`.
FAST = ("reassoc", "contract", "arcp", "nsz")
BYTES = ir.VectorType(BYTE, 4 * LANES)
_FEATURES = llvmlite.binding.get_host_cpu_features()
# Sixteen numbers are one register of AVX-512, or two of AVX2.
HAS_WIDE_VECTORS = _FEATURES.get("avx512f", False)
HAS_VECTORS = HAS_WIDE_VECTORS or (_FEATURES.get("avx2", False) and _FEATURES.get("fma", False))
HAS_INT8_PRODUCT = _FEATURES.get("avx512vnni", False)
HAS_PAIR_PRODUCT = _FEATURES.get("avx512bf16", False)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's `bfloat`, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


HALVES, PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)


def pointer_to(context: Any, builder: Any, kind: Any, array: Any, element: Any) -> Any:
    """Return the start of an array's numbers, as a pointer to `element`."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(data, element.as_pointer())


def floats(value: float) -> Any:
    """Return a vector type of one number type."""
    return ir.Constant(FLOATS, [ir.Constant(FLOAT, float(np.float32(value)))] * LANES)


def integers(value: int) -> Any:
    """Return a vector of one integer."""
    return ir.Constant(INTS, [ir.Constant(INT, value)] * LANES)


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """Return a vector of `scalar` in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, None))


def load(builder: Any, pointer: Any, index: Any, kind: Any) -> Any:
    """Return the vector that begins at element `index`."""
    place = builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())
    return builder.load(place, align=4)


def store(builder: Any, value: Any, pointer: Any, index: Any) -> None:
    """Write a vector from element `index` on."""
    place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, place, align=2)


def prefetch(builder: Any, pointer: Any, index: Any) -> None:
    """Prefetch the cache line of element `index` without waiting for it."""
    place = builder.bitcast(builder.gep(pointer, [index]), BYTE.as_pointer())
    # To read, into all caches, data.
    flags = (ir.Constant(INT, flag) for flag in (0, 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *flags)


def call(builder: Any, name: str, result: Any, *arguments: Any, flags: Any = ()) -> Any:
    """Call one of LLVM's own functions."""
    declared = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, declared, name)
    return builder.call(function, arguments, fastmath=flags)


@contextmanager
def repeated(builder: Any, count: Any) -> Iterator[Any]:
    """Write a loop that LLVM does not unroll: yield the index, which counts from 0 below `count`.

    Its body keeps the processor busy already; LLVM would copy it many times.
    """
    before = builder.block
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(WORD)
    index.add_incoming(ir.Constant(WORD, 0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    yield index
    following = builder.add(index, ir.Constant(WORD, 1))
    index.add_incoming(following, builder.block)
    builder.branch(head).set_metadata("llvm.loop", _left_as_it_is(builder.module))
    builder.position_at_end(after)


def _left_as_it_is(module: Any) -> Any:
    """Return a loop's metadata, the first of which is itself."""
    unrolling = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    own = ir.MDValue(module, [unrolling], name=str(len(module.metadata)))
    own.operands = (own, unrolling)
    return own


def multiply_add(builder: Any, total: Any, a: Any, b: Any, *, is_paired: bool) -> Any:
    """Return `total` + a · b for words `a` and `b`, lane by lane: in pairs, both halves' products.

    fp32 throughout; the instruction for pairs treats numbers below 2**-126 as zero.
    """

    def fused(total: Any, a: Any, b: Any) -> Any:
        # Never reordered: a row's sum must not depend on how many rows there are.
        product = builder.fmul(*(builder.bitcast(x, FLOATS) for x in (a, b)), ("contract",))
        return builder.fadd(total, product, ("contract",))

    if not is_paired:
        return fused(total, a, b)
    if HAS_PAIR_PRODUCT:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        pairs = (builder.bitcast(words, PAIRS) for words in (a, b))
        return call(builder, name, FLOATS, total, *pairs)
    total = fused(total, *(builder.shl(words, integers(16)) for words in (a, b)))
    return fused(total, *(builder.and_(words, integers(-65536)) for words in (a, b)))


@intrinsic
def rotate(_typing: Any, numbers: Any, _at: Any) -> Any:  # fp32, the first of 64 numbers
    """Multiply 64 numbers by Hadamard's matrix of ones in place: within vectors, then between."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(context, builder, signature.args[0], args[0], FLOAT)
        places = [builder.add(args[1], ir.Constant(WORD, LANES * i)) for i in range(4)]
        vectors = [load(builder, pointer, place, FLOATS) for place in places]
        undefined = ir.Constant(FLOATS, ir.Undefined)
        for distance in (1, 2, 4, 8):
            others = ir.Constant(INTS, [ir.Constant(INT, i ^ distance) for i in range(LANES)])
            signs = [ir.Constant(FLOAT, -1.0 if i & distance else 1.0) for i in range(LANES)]
            vectors = [
                builder.fadd(
                    builder.shuffle_vector(lanes, undefined, others),
                    builder.fmul(lanes, ir.Constant(FLOATS, signs), FAST),
                    FAST,
                )
                for lanes in vectors
            ]
        for distance in (1, 2):
            before = vectors
            vectors = [
                builder.fsub(before[i ^ distance], before[i], FAST)
                if i & distance
                else builder.fadd(before[i], before[i ^ distance], FAST)
                for i in range(4)
            ]
        for place, lanes in zip(places, vectors, strict=True):
            store(builder, lanes, pointer, place)
        return context.get_dummy_value()

    return types.void(numbers, types.int64), generate


def multiply_add_int8(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return `total` plus the four products of uint8 `a` and int8 `b` of each word, in int32."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    return call(builder, name, INTS, total, *(builder.bitcast(words, BYTES) for words in (a, b)))


def round_to_bf16(builder: Any, lanes: Any) -> Any:
    """Return a vector of fp32 as bf16: to the nearest, ties to even; NaN is preserved.

    Without an instruction for it, LLVM would call a function that no library here has.
    """
    if HAS_PAIR_PRODUCT:
        return builder.fptrunc(lanes, HALVES)
    bits = builder.bitcast(lanes, INTS)
    is_odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.add(bits, builder.add(is_odd, integers(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", lanes, lanes)
    bits = builder.select(is_nan, builder.or_(bits, integers(1 << 22)), rounded)
    upper = builder.trunc(builder.lshr(bits, integers(16)), ir.VectorType(ir.IntType(16), LANES))
    return builder.bitcast(upper, HALVES)


def over_lanes(builder: Any, lanes: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Reduce all lanes by `join`, two by two; the result is in every lane."""
    for distance in (8, 4, 2, 1):
        rotated = [ir.Constant(INT, (lane + distance) % LANES) for lane in range(LANES)]
        other = builder.shuffle_vector(lanes, lanes, ir.Constant(INTS, rotated))
        lanes = join(lanes, other)
    return lanes


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Return sixteen vectors of words, lane i of number j being lane j of number i."""
    for distance in (8, 4, 2, 1):
        first = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        second = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        rotated = list(rows)
        for low in range(LANES):
            if low & distance:
                continue
            pair = rows[low], rows[low + distance]
            for place, picked in ((low, first), (low + distance, second)):
                mask = ir.Constant(INTS, [ir.Constant(INT, lane) for lane in picked])
                rotated[place] = builder.shuffle_vector(*pair, mask)
        rows = rotated
    return rows


def exponential(builder: Any, x: Any) -> Any:
    """Return e**x for vectors of x <= 0, as `scalars.exp` does."""

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, FAST), c, FAST)

    lowest = floats(-87.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    n = builder.fptosi(multiply_add(x, floats(1.4426950408889634), floats(-0.5)), INTS)
    whole = builder.sitofp(n, FLOATS)
    r = multiply_add(whole, floats(-0.693359375), x)
    r = multiply_add(whole, floats(2.12194440e-4), r)
    y = floats(EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        y = multiply_add(y, r, floats(coefficient))
    y = multiply_add(builder.fmul(y, r, FAST), r, builder.fadd(r, floats(1.0), FAST))
    power = builder.shl(builder.add(n, integers(127)), integers(23))
    return builder.fmul(y, builder.bitcast(power, FLOATS), FAST)
