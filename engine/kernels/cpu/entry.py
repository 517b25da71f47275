"""What comes before attention on the CPU: heads normed and turned, keys and values to their pages.

A page of a head is `[units, PAGE_SIZE]` words of keys and `[units of tokens, width]` words of
values, a word being one fp32 or two bf16: of a key two neighbouring numbers, of values the same
number of two neighbouring tokens. So a word is a factor as it lies (see `vectors`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from engine.kernels.cpu import vectors
from engine.kernels.cpu.compiling import compiled, intrinsic
from engine.kernels.cpu.flash import PAGE_SIZE
from engine.kernels.cpu.scalars import narrow, widen
from engine.kernels.cpu.threads import share
from engine.kernels.cpu.vectors import FAST, FLOAT, FLOATS, LANES, WORD

TOKENS_AT_ONCE = 16


@compiled
def enter_tokens(
    words: Any,
    qkv: Any,  # [T, (Hq + 2·Hkv)·D]
    bits: Any,
    turns: Any,  # [T, 2·R] float32
    query_weight: Any,  # [D] float32, or empty for no norm
    key_weight: Any,
    eps: Any,
    slots: Any,  # [T] int32
    query: Any,  # [T, Hq, D]
    keys: Any,  # [pages, Hkv, units, PAGE_SIZE] int32
    values: Any,  # [pages, Hkv, units of tokens, width] int32
) -> None:
    """Split, norm and turn; write the queries out, keys and values to their slots.

    `bits` are those of `qkv` as integers.
    """
    items = (len(qkv) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    arguments = (qkv, bits, turns, query_weight, key_weight, eps, slots, query, keys, values)
    share(words, items, _enter_some, arguments)


@compiled
def store_tokens(words: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    """Write words `key [T, Hkv, units]` and bits `value [T, Hkv · Dv]` to their slots."""
    items = (len(slots) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    share(words, items, _store_some, (key, value, slots, keys, values))


@compiled
def _enter_some(
    item: Any,
    qkv: Any,
    bits: Any,
    turns: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    slots: Any,
    query: Any,
    keys: Any,
    values: Any,
) -> None:
    query_heads, width = query.shape[1:]
    heads, units = keys.shape[1:3]
    first_key, first_value = query_heads * width, (query_heads + heads) * width
    turned = np.empty(heads * width, qkv.dtype)
    words = turned.view(np.int32)
    for token in range(item * TOKENS_AT_ONCE, min((item + 1) * TOKENS_AT_ONCE, len(qkv))):
        row, own_turns = qkv[token], turns[token]
        _turn_heads(row, 0, own_turns, query_weight, eps, query[token].reshape(-1), width)
        _turn_heads(row, first_key, own_turns, key_weight, eps, turned, width)
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for head in range(heads):
            for unit in range(units):
                keys[page, head, unit, offset] = words[head * units + unit]
            _store_value(token, head, bits, first_value + head * width, width, slots, values)


@compiled
def _turn_heads(
    row: Any, first: Any, turns: Any, weight: Any, eps: Any, out: Any, width: Any
) -> None:
    """Norm heads where there is a weight, and turn the first numbers of each."""
    half = len(turns) // 2
    if width % LANES == 0 and half % LANES == 0:
        for start in range(0, len(out), width):
            turn(row, first + start, turns, half, weight, len(weight), eps, out, start, width)
        return
    head = np.empty(width, np.float32)
    for start in range(0, len(out), width):
        for d in range(width):
            head[d] = widen(row[first + start + d])
        if len(weight) > 0:
            total = np.float32(0)
            for d in range(width):
                total += head[d] * head[d]
            scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
            for d in range(width):
                head[d] *= scale * weight[d]
        for d in range(half):
            one, other = head[d], head[half + d]
            cos, sin = turns[d], turns[half + d]
            head[d] = one * cos - other * sin
            head[half + d] = other * cos + one * sin
        for d in range(width):
            out[start + d] = narrow(head[d], row[0])


@intrinsic
def turn(
    _typing: Any,
    row: Any,
    _first: Any,
    turns: Any,
    _half: Any,
    weight: Any,
    _num_weights: Any,
    _eps: Any,
    out: Any,
    _start: Any,
    _width: Any,
) -> Any:
    """Norm and turn one head whose widths are whole vectors, as `_turn_heads` does any."""
    int64 = types.int64
    signature = types.void(
        row, int64, turns, int64, weight, int64, types.float32, out, int64, int64
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = FLOAT if row.dtype == types.float32 else vectors.HALVES.element
        numbers = ir.VectorType(number, LANES)

        def pointer(index: int, element: Any) -> Any:
            kind = signature.args[index]
            return vectors.pointer_to(context, builder, kind, args[index], element)

        source = builder.gep(pointer(0, number), [args[1]])
        target = builder.gep(pointer(7, number), [args[8]])
        own_turns, weights = pointer(2, FLOAT), pointer(4, FLOAT)
        half, width = args[3], args[9]

        def word(value: int) -> Any:
            return ir.Constant(WORD, value)

        def loaded(at: Any) -> Any:
            lanes = vectors.load(builder, source, at, numbers)
            return lanes if number is FLOAT else builder.fpext(lanes, FLOATS)

        def stored(lanes: Any, at: Any) -> None:
            lanes = lanes if number is FLOAT else builder.fptrunc(lanes, numbers)
            vectors.store(builder, lanes, target, at)

        is_normed = builder.icmp_signed(">", args[5], word(0))
        total = cgutils.alloca_once_value(builder, vectors.floats(0))
        builder.store(vectors.floats(0), total)
        with (
            builder.if_then(is_normed),
            vectors.repeated(builder, builder.udiv(width, word(LANES))) as number_,
        ):
            lanes = loaded(builder.mul(number_, word(LANES)))
            squares = builder.fmul(lanes, lanes, FAST)
            builder.store(builder.fadd(builder.load(total), squares, FAST), total)
        mean = builder.fdiv(
            vectors.over_lanes(builder, builder.load(total), builder.fadd),
            vectors.splat(builder, builder.sitofp(width, FLOAT), FLOATS),
        )
        mean = builder.fadd(mean, vectors.splat(builder, args[6], FLOATS))
        root = vectors.call(builder, "llvm.sqrt.v16f32", FLOATS, mean)
        scale = builder.fdiv(vectors.floats(1), root)

        def normed(at: Any) -> Any:
            place = cgutils.alloca_once(builder, FLOATS)
            builder.store(loaded(at), place)
            with builder.if_then(is_normed):
                factor = builder.fmul(scale, vectors.load(builder, weights, at, FLOATS), FAST)
                builder.store(builder.fmul(builder.load(place), factor, FAST), place)
            return builder.load(place)

        with vectors.repeated(builder, builder.udiv(half, word(LANES))) as number_:
            at = builder.mul(number_, word(LANES))
            beyond = builder.add(at, half)
            one, other = normed(at), normed(beyond)
            cos, sin = (vectors.load(builder, own_turns, place, FLOATS) for place in (at, beyond))
            products = [
                builder.fmul(a, b, FAST)
                for a, b in ((one, cos), (other, sin), (other, cos), (one, sin))
            ]
            stored(builder.fsub(products[0], products[1], FAST), at)
            stored(builder.fadd(products[2], products[3], FAST), beyond)
        turned = builder.mul(half, word(2))
        rest = builder.udiv(builder.sub(width, turned), word(LANES))
        with vectors.repeated(builder, rest) as number_:
            at = builder.add(turned, builder.mul(number_, word(LANES)))
            stored(normed(at), at)
        return context.get_dummy_value()

    return signature, generate


@compiled
def _store_some(item: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    heads, units = key.shape[1:]
    width = value.shape[1] // heads
    for token in range(item * TOKENS_AT_ONCE, min((item + 1) * TOKENS_AT_ONCE, len(slots))):
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for head in range(heads):
            for unit in range(units):
                keys[page, head, unit, offset] = key[token, head, unit]
            _store_value(token, head, value, head * width, width, slots, values)


@compiled
def _store_value(
    token: Any, head: Any, bits: Any, first: Any, width: Any, slots: Any, values: Any
) -> None:
    """Write numbers `first : first + width` of a token's row as its value.

    The first of two tokens in a word writes both: the other's are those of the next row where it
    is stored in the same step, else zero, as what lay there before must not be met. So no two
    threads write one word.
    """
    page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
    row = bits[token, first : first + width]
    if bits.itemsize == 4:
        out = values[page, head, offset]
        for d in range(width):
            out[d] = row[d]
        return
    out = values[page, head, offset // 2]
    if offset % 2 == 0:
        if token + 1 < len(slots) and slots[token + 1] == slots[token] + 1:
            after = bits[token + 1, first : first + width]
            for d in range(width):
                out[d] = np.uint32(row[d]) | np.uint32(after[d]) << np.uint32(16)
        else:
            for d in range(width):
                out[d] = row[d]
    elif token == 0 or slots[token - 1] != slots[token] - 1:
        for d in range(width):
            out[d] = np.uint32(out[d]) & np.uint32(0xFFFF) | np.uint32(row[d]) << np.uint32(16)
