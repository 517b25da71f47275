"""The CPU's versions of attention, norm and gate, compiled by numba; each names its reference.

torch's CPU flash attention wants each sequence's keys contiguous and one call a sequence; here one
parallel loop runs all sequences and key heads of a layer over the pages where they lie. bfloat16 is
widened in registers, arithmetic is fp32, and a row is summed in page order whatever runs beside it.
All of it is one file because numba's disk cache notices changes of the kernel's own file only.

Loops are unrolled by hand where LLVM would not: sums over four rows at once keep the vector units
busy, where one row at a time waits for each sum.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.attention import AttentionShape
from engine.kernels.packed import PackedStep

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
LOWEST = np.float32(-1e30)
# What reorders and fuses, but not the leave to take that there are no NaN and no infinity (`nnan`,
# `ninf`): a row that holds one must come out as one, and become an error.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
UNROLL = 4
PAGE_SIZE = 16  # one fp32 vector of AVX-512; a constant, so that loops over a page unroll


def elements(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a contiguous CPU tensor as numpy sees it: bfloat16 as its uint16 bits, no copy."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic  # type: ignore[untyped-decorator]
def widen(_typing: Any, value: Any) -> Any:
    """Return an element as float32: bfloat16 arrives as its uint16 bits."""
    if value == types.float32:
        return types.float32(types.float32), lambda _context, _builder, _signature, args: args[0]

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], BITS), ir.Constant(BITS, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
def exp(_typing: Any, _value: Any) -> Any:
    """Give e**x for float32 x <= 0 within 2 ulp, e**-87 below -87; libm would not vectorise.

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


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_typing: Any, array: Any, page: Any, head: Any, row: Any, column: Any) -> Any:
    """Ask for the cache line of `array[page, head, row, column]`; nothing waits for it."""

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


@numba.njit(fastmath=FAST_MATH, inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    """Give the hyperbolic tangent in fp32, from `exp`."""
    e = exp(np.float32(-2.0) * abs(x))
    y = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return y if x >= 0 else -y


@numba.njit(fastmath=FAST_MATH, inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def sigmoid(x: Any) -> Any:
    """Give 1 / (1 + e**-x) in fp32, from `exp`."""
    e = exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)


@numba.njit(  # type: ignore[untyped-decorator]
    fastmath=FAST_MATH, nogil=True, cache=True, error_model="numpy"
)
def _decode_item(
    row: Any,
    head: Any,
    query: Any,  # [N, Hkv, G, Dk] float32, scaled
    keys: Any,  # [pages, Hkv, Dk, PAGE_SIZE]
    values: Any,  # [pages, Hkv, PAGE_SIZE, Dv]
    pages: Any,  # [N, max] int32
    lengths: Any,  # [N] int32
    window: Any,
    softcap: Any,
    sinks: Any,  # [Hkv, G] float32
    scratch: Any,  # [G, PAGE_SIZE + 2] float32
    out: Any,  # [G, Dv] float32
) -> None:
    group, key_dim = query.shape[2], query.shape[3]
    value_dim = values.shape[3]
    highest, mass = PAGE_SIZE, PAGE_SIZE + 1
    pair = np.empty(PAGE_SIZE, np.float32)
    length = lengths[row]
    first = max(0, length - window)
    for g in range(group):
        scratch[g, highest] = LOWEST
        scratch[g, mass] = 0
        for d in range(value_dim):
            out[g, d] = 0
    last = (length - 1) // PAGE_SIZE
    for index in range(first // PAGE_SIZE, last + 1):
        page = pages[row, index]
        after = pages[row, min(index + 1, last)]
        base = index * PAGE_SIZE
        for g in range(0, group, 2):
            # A pair of query heads shares every widened key; an odd last head is its own pair.
            h = min(g + 1, group - 1)
            for t in range(PAGE_SIZE):
                scratch[g, t] = 0
                pair[t] = 0
            for d in range(0, key_dim, UNROLL):
                if g == 0:
                    prefetch(keys, after, head, d, 0)
                    prefetch(keys, after, head, d + 1, 0)
                    prefetch(keys, after, head, d + 2, 0)
                    prefetch(keys, after, head, d + 3, 0)
                a0, b0 = query[row, head, g, d], query[row, head, h, d]
                a1, b1 = query[row, head, g, d + 1], query[row, head, h, d + 1]
                a2, b2 = query[row, head, g, d + 2], query[row, head, h, d + 2]
                a3, b3 = query[row, head, g, d + 3], query[row, head, h, d + 3]
                for t in range(PAGE_SIZE):
                    k0 = widen(keys[page, head, d, t])
                    k1 = widen(keys[page, head, d + 1, t])
                    k2 = widen(keys[page, head, d + 2, t])
                    k3 = widen(keys[page, head, d + 3, t])
                    scratch[g, t] += (a0 * k0 + a1 * k1) + (a2 * k2 + a3 * k3)
                    pair[t] += (b0 * k0 + b1 * k1) + (b2 * k2 + b3 * k3)
            for t in range(PAGE_SIZE):
                scratch[h, t] = pair[t]
        for g in range(group):
            if softcap > 0:
                for t in range(PAGE_SIZE):
                    scratch[g, t] = softcap * tanh(scratch[g, t] / softcap)
            peak = scratch[g, highest]
            for t in range(PAGE_SIZE):
                seen = first <= base + t and base + t < length
                x = scratch[g, t] if seen else LOWEST
                scratch[g, t] = x
                peak = max(peak, x)
            shrink = exp(scratch[g, highest] - peak)
            scratch[g, highest] = peak
            added = np.float32(0)
            for t in range(PAGE_SIZE):
                weight = exp(scratch[g, t] - peak)
                scratch[g, t] = weight
                added += weight
            scratch[g, mass] = scratch[g, mass] * shrink + added
            for d in range(value_dim):
                out[g, d] *= shrink
        # Slots beyond the length are not read: what they hold, NaN even, is not ours.
        count = min(PAGE_SIZE, length - base)
        whole = count - count % UNROLL
        for g in range(0, group, 2):
            h = g + 1
            for t in range(0, whole, UNROLL):
                if g == 0:
                    for d in range(0, value_dim, 16):
                        prefetch(values, after, head, t, d)
                        prefetch(values, after, head, t + 1, d)
                        prefetch(values, after, head, t + 2, d)
                        prefetch(values, after, head, t + 3, d)
                a0, a1 = scratch[g, t], scratch[g, t + 1]
                a2, a3 = scratch[g, t + 2], scratch[g, t + 3]
                if h == group:
                    for d in range(value_dim):
                        v0 = widen(values[page, head, t, d])
                        v1 = widen(values[page, head, t + 1, d])
                        v2 = widen(values[page, head, t + 2, d])
                        v3 = widen(values[page, head, t + 3, d])
                        out[g, d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                    continue
                b0, b1 = scratch[h, t], scratch[h, t + 1]
                b2, b3 = scratch[h, t + 2], scratch[h, t + 3]
                for d in range(value_dim):
                    v0 = widen(values[page, head, t, d])
                    v1 = widen(values[page, head, t + 1, d])
                    v2 = widen(values[page, head, t + 2, d])
                    v3 = widen(values[page, head, t + 3, d])
                    out[g, d] += (a0 * v0 + a1 * v1) + (a2 * v2 + a3 * v3)
                    out[h, d] += (b0 * v0 + b1 * v1) + (b2 * v2 + b3 * v3)
        for g in range(group):
            for t in range(whole, count):
                p = scratch[g, t]
                for d in range(value_dim):
                    out[g, d] += p * widen(values[page, head, t, d])
    for g in range(group):
        peak = max(scratch[g, highest], sinks[head, g])
        shrink = exp(scratch[g, highest] - peak)
        total = scratch[g, mass] * shrink + exp(sinks[head, g] - peak)
        for d in range(value_dim):
            out[g, d] *= shrink / total


# The parallel loop only calls: numba's analysis of a long parallel body takes many seconds.
@numba.njit(  # type: ignore[untyped-decorator]
    parallel=True, fastmath=FAST_MATH, nogil=True, cache=True, error_model="numpy"
)
def _decode_items(
    query: Any,
    keys: Any,
    values: Any,
    pages: Any,
    lengths: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    scratch: Any,  # [N·Hkv, G, PAGE_SIZE + 2]
    out: Any,  # [N·Hkv, G, Dv]
) -> None:
    heads = query.shape[1]
    for item in numba.prange(out.shape[0]):
        _decode_item(
            item // heads,
            item % heads,
            query,
            keys,
            values,
            pages,
            lengths,
            window,
            softcap,
            sinks,
            scratch[item],
            out[item],
        )


def supports_attention(dtype: torch.dtype, shape: AttentionShape, page_size: int) -> bool:
    """Say whether `store` and `decode` serve a cache of this dtype and shape."""
    return dtype in DTYPES and shape.key_dim % UNROLL == 0 and page_size == PAGE_SIZE


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PackedStep,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one query a sequence to its pages: `query [N, Hq, Dk]` → `[N, Hq, Dv]`.

    The reference is `reference.decode`. Slots that no token has written do not count, NaN or not.
    """
    heads, group = shape.num_kv_heads, shape.num_query_heads // shape.num_kv_heads
    rows = query.shape[0]
    scaled = query.float().mul(shape.scaling).view(rows, heads, group, shape.key_dim)
    if sinks is None:
        sink = np.full((heads, group), LOWEST, np.float32)
    else:
        sink = sinks.detach().float().view(heads, group).numpy()
    out = torch.empty(rows * heads, group, shape.value_dim)
    _decode_items(
        scaled.contiguous().numpy(),
        elements(keys),
        elements(values),
        step.decode_pages.numpy(),
        step.decode_lengths.numpy(),
        np.int32(shape.window or np.iinfo(np.int32).max),
        np.float32(shape.softcap),
        sink,
        np.empty((rows * heads, group, PAGE_SIZE + 2), np.float32),
        out.numpy(),
    )
    return out.view(rows, shape.num_query_heads, shape.value_dim).to(query.dtype)


@numba.njit(  # type: ignore[untyped-decorator]
    parallel=True, fastmath=FAST_MATH, nogil=True, cache=True, error_model="numpy"
)
def _norm_rows(x: Any, weight: Any, eps: Any, out: Any) -> None:
    width = x.shape[1]
    for row in numba.prange(x.shape[0]):
        total = np.float32(0)
        for i in range(width):
            value = widen(x[row, i])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            out[row, i] = narrow(widen(x[row, i]) * scale * weight[i], x[row, i])


@numba.njit(  # type: ignore[untyped-decorator]
    parallel=True, fastmath=FAST_MATH, nogil=True, cache=True, error_model="numpy"
)
def _gate_rows(both: Any, out: Any) -> None:
    width = out.shape[1]
    for row in numba.prange(out.shape[0]):
        for i in range(width):
            g = widen(both[row, i])
            out[row, i] = narrow(g * sigmoid(g) * widen(both[row, width + i]), both[row, i])


@numba.njit(  # type: ignore[untyped-decorator]
    parallel=True, fastmath=FAST_MATH, nogil=True, cache=True, error_model="numpy"
)
def _store_tokens(keys: Any, values: Any, key: Any, value: Any, pages: Any, offsets: Any) -> None:
    for token in numba.prange(pages.shape[0]):
        page, offset = pages[token], offsets[token]
        for head in range(key.shape[1]):
            for d in range(key.shape[2]):
                keys[page, head, d, offset] = key[token, head, d]
            for d in range(value.shape[2]):
                values[page, head, offset, d] = value[token, head, d]


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, step: PackedStep) -> None:
    """Write the step's `key [T, Hkv, Dk]` and `value [T, Hkv, Dv]` to their slots.

    The reference is `reference.store`.
    """
    _store_tokens(
        elements(keys),
        elements(values),
        elements(key.contiguous()),
        elements(value.contiguous()),
        step.token_pages.numpy(),
        step.token_offsets.numpy(),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last axis: `x […, H]`, fp32 `weight [H]` → `[…, H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _norm_rows(elements(flat), weight.numpy(), np.float32(eps), elements(out))
    return out.view(x.shape)


def silu_mul(both: Tensor) -> Tensor:
    """Return silu(gate) · up of gate and up side by side: `both […, 2·I]` → `[…, I]`."""
    flat = both.reshape(-1, both.shape[-1])
    out = torch.empty(flat.shape[0], flat.shape[1] // 2, dtype=both.dtype)
    _gate_rows(elements(flat), elements(out))
    return out.view(*both.shape[:-1], -1)
