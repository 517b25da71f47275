"""The CPU's versions of attention, norm and gate, compiled by numba; each names its reference.

torch's CPU flash attention wants each sequence's keys contiguous and one call a sequence; here one
parallel loop runs all sequences and key heads of a layer over the pages where they lie. bfloat16 is
widened in registers, arithmetic is fp32, and a row is summed in page order whatever runs beside it.
All of it is one file because numba's disk cache notices changes of the kernel's own file only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    """Return e**x for float32 x <= 0 within 2 ulp, 0 far below; a call to libm would not vectorise.

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
    """Give 1 / (1 + e**-x) in fp32, from `exp`, exact at both ends."""
    e = exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else e) / (np.float32(1.0) + e)


@cache
def kernel(group: int, key_dim: int, value_dim: int, page_size: int) -> Callable[..., None]:
    """Compile the decode loop for one shape; the machine code is kept on disk between runs."""

    @numba.njit(  # type: ignore[untyped-decorator]
        parallel=True, fastmath=True, nogil=True, cache=True, error_model="numpy"
    )
    def decode_pages(
        query: Any,  # [N, Hkv, G, Dk] float32, scaled
        keys: Any,  # [pages, Hkv, Dk, page_size]
        values: Any,  # [pages, Hkv, page_size, Dv]
        pages: Any,  # [N, max] int32
        lengths: Any,  # [N] int32
        window: Any,
        softcap: Any,
        sinks: Any,  # [Hkv, G] float32
        out: Any,  # [N, Hkv, G, Dv] float32
    ) -> None:
        heads = query.shape[1]
        for item in numba.prange(query.shape[0] * heads):
            row, head = item // heads, item % heads
            length = lengths[row]
            first = max(0, length - window)
            total = np.zeros((group, value_dim), np.float32)
            score = np.empty((group, page_size), np.float32)
            highest = np.full(group, LOWEST, np.float32)
            mass = np.zeros(group, np.float32)
            for index in range(first // page_size, (length + page_size - 1) // page_size):
                page = pages[row, index]
                base = index * page_size
                score[:] = 0
                for d in range(0, key_dim, UNROLL):
                    for g in range(group):
                        q = query[row, head, g, d : d + UNROLL]
                        k = keys[page, head, d : d + UNROLL]
                        for t in range(page_size):
                            score[g, t] += (
                                (q[0] * widen(k[0, t]) + q[1] * widen(k[1, t]))
                                + (q[2] * widen(k[2, t]) + q[3] * widen(k[3, t]))
                            ) + (
                                (q[4] * widen(k[4, t]) + q[5] * widen(k[5, t]))
                                + (q[6] * widen(k[6, t]) + q[7] * widen(k[7, t]))
                            )
                for g in range(group):
                    if softcap > 0:
                        for t in range(page_size):
                            score[g, t] = softcap * tanh(score[g, t] / softcap)
                    peak = highest[g]
                    for t in range(page_size):
                        seen = first <= base + t and base + t < length
                        x = score[g, t] if seen else LOWEST
                        score[g, t] = x
                        peak = max(peak, x)
                    shrink = exp(highest[g] - peak)
                    highest[g] = peak
                    added = np.float32(0)
                    for t in range(page_size):
                        weight = exp(score[g, t] - peak)
                        score[g, t] = weight
                        added += weight
                    mass[g] = mass[g] * shrink + added
                    for d in range(value_dim):
                        total[g, d] *= shrink
                for t in range(0, page_size, UNROLL):
                    for g in range(group):
                        p = score[g, t : t + UNROLL]
                        v = values[page, head, t : t + UNROLL]
                        for d in range(value_dim):
                            total[g, d] += (
                                (p[0] * widen(v[0, d]) + p[1] * widen(v[1, d]))
                                + (p[2] * widen(v[2, d]) + p[3] * widen(v[3, d]))
                            ) + (
                                (p[4] * widen(v[4, d]) + p[5] * widen(v[5, d]))
                                + (p[6] * widen(v[6, d]) + p[7] * widen(v[7, d]))
                            )
            for g in range(group):
                peak = max(highest[g], sinks[head, g])
                shrink = exp(highest[g] - peak)
                whole = mass[g] * shrink + exp(sinks[head, g] - peak)
                for d in range(value_dim):
                    out[row, head, g, d] = total[g, d] * (shrink / whole)

    return decode_pages  # type: ignore[no-any-return]


def supports_attention(dtype: torch.dtype, shape: AttentionShape) -> bool:
    """Say whether `decode_attention` serves a cache of this dtype and shape."""
    return dtype in DTYPES and shape.key_dim % UNROLL == 0


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PackedStep,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one query a sequence to its pages: `query [N, Hq, Dk]` → `[N, Hq, Dv]`.

    The reference is `attention.decode`. Cache elements that no token has written must be finite:
    they are weighted by zero.
    """
    heads, group = shape.num_kv_heads, shape.num_query_heads // shape.num_kv_heads
    rows = query.shape[0]
    scaled = query.float().mul(shape.scaling).view(rows, heads, group, shape.key_dim)
    if sinks is None:
        sink = np.full((heads, group), LOWEST, np.float32)
    else:
        sink = sinks.detach().float().view(heads, group).numpy()
    out = torch.empty(rows, heads, group, shape.value_dim)
    run = kernel(group, shape.key_dim, shape.value_dim, keys.shape[3])
    run(
        scaled.contiguous().numpy(),
        elements(keys),
        elements(values),
        step.decode_pages.numpy(),
        step.decode_lengths.numpy(),
        np.int32(shape.window or np.iinfo(np.int32).max),
        np.float32(shape.softcap),
        sink,
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
