"""The CPU's versions of attention, norm and gate, compiled by numba; each names its reference.

torch's CPU flash attention wants each sequence's keys contiguous and one call a sequence; here one
parallel loop runs all sequences and key heads of a layer over the pages where they lie. bfloat16 is
widened in registers, arithmetic is fp32, and a row is summed in page order whatever runs beside it.
All of it is one file because numba's disk cache notices changes of the kernel's own file only.

Loops are unrolled by hand where LLVM would not: sums over eight rows at once keep the vector units
busy, where one row at a time waits for each sum.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from engine.kernels.attention import AttentionShape, PackedStep

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
UNROLL = 8
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


@numba.njit(fastmath=True, inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def tanh(x: Any) -> Any:
    """Give the hyperbolic tangent in fp32, from `exp`."""
    e = exp(np.float32(-2.0) * abs(x))
    y = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return y if x >= 0 else -y


@numba.njit(fastmath=True, inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def sigmoid(x: Any) -> Any:
    """Give 1 / (1 + e**-x) in fp32, from `exp`."""
    e = exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)


@numba.njit(  # type: ignore[untyped-decorator]
    fastmath=True, nogil=True, cache=True, error_model="numpy"
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
    length = lengths[row]
    first = max(0, length - window)
    for g in range(group):
        scratch[g, highest] = LOWEST
        scratch[g, mass] = 0
        for d in range(value_dim):
            out[g, d] = 0
    for index in range(first // PAGE_SIZE, (length + PAGE_SIZE - 1) // PAGE_SIZE):
        page = pages[row, index]
        base = index * PAGE_SIZE
        for g in range(group):
            for t in range(PAGE_SIZE):
                scratch[g, t] = 0
            for d in range(0, key_dim, UNROLL):
                q0, q1 = query[row, head, g, d], query[row, head, g, d + 1]
                q2, q3 = query[row, head, g, d + 2], query[row, head, g, d + 3]
                q4, q5 = query[row, head, g, d + 4], query[row, head, g, d + 5]
                q6, q7 = query[row, head, g, d + 6], query[row, head, g, d + 7]
                for t in range(PAGE_SIZE):
                    k0 = q0 * widen(keys[page, head, d, t])
                    k1 = q1 * widen(keys[page, head, d + 1, t])
                    k2 = q2 * widen(keys[page, head, d + 2, t])
                    k3 = q3 * widen(keys[page, head, d + 3, t])
                    k4 = q4 * widen(keys[page, head, d + 4, t])
                    k5 = q5 * widen(keys[page, head, d + 5, t])
                    k6 = q6 * widen(keys[page, head, d + 6, t])
                    k7 = q7 * widen(keys[page, head, d + 7, t])
                    scratch[g, t] += ((k0 + k1) + (k2 + k3)) + ((k4 + k5) + (k6 + k7))
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
        for g in range(group):
            for t in range(0, whole, UNROLL):
                p0, p1 = scratch[g, t], scratch[g, t + 1]
                p2, p3 = scratch[g, t + 2], scratch[g, t + 3]
                p4, p5 = scratch[g, t + 4], scratch[g, t + 5]
                p6, p7 = scratch[g, t + 6], scratch[g, t + 7]
                for d in range(value_dim):
                    v0 = p0 * widen(values[page, head, t, d])
                    v1 = p1 * widen(values[page, head, t + 1, d])
                    v2 = p2 * widen(values[page, head, t + 2, d])
                    v3 = p3 * widen(values[page, head, t + 3, d])
                    v4 = p4 * widen(values[page, head, t + 4, d])
                    v5 = p5 * widen(values[page, head, t + 5, d])
                    v6 = p6 * widen(values[page, head, t + 6, d])
                    v7 = p7 * widen(values[page, head, t + 7, d])
                    out[g, d] += ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7))
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
    parallel=True, fastmath=True, nogil=True, cache=True, error_model="numpy"
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
    """Say whether `decode_attention` serves a cache of this dtype and shape."""
    return dtype in DTYPES and shape.key_dim % UNROLL == 0 and page_size == PAGE_SIZE


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PackedStep,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one query a sequence to its pages: `query [N, Hq, Dk]` → `[N, Hq, Dv]`.

    The reference is `attention.decode`. Slots that no token has written do not count, NaN or not.
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
    parallel=True, fastmath=True, nogil=True, cache=True, error_model="numpy"
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
    parallel=True, fastmath=True, nogil=True, cache=True, error_model="numpy"
)
def _gate_rows(gate: Any, up: Any, out: Any) -> None:
    for row in numba.prange(gate.shape[0]):
        for i in range(gate.shape[1]):
            g = widen(gate[row, i])
            out[row, i] = narrow(g * sigmoid(g) * widen(up[row, i]), gate[row, i])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last axis: `x […, H]`, fp32 `weight [H]` → `[…, H]`."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _norm_rows(elements(flat), weight.numpy(), np.float32(eps), elements(out))
    return out.view(x.shape)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up: `[…, I]` twice, contiguous → `[…, I]`."""
    width = gate.shape[-1]
    # Not in place: an output that may alias an input keeps the loop from vectorising.
    out = torch.empty_like(gate)
    _gate_rows(
        elements(gate.view(-1, width)), elements(up.view(-1, width)), elements(out.view(-1, width))
    )
    return out
