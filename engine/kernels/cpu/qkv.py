"""Fused QK norm, RoPE and KV cache write on the CPU, before attention.

A page of a head is `[units, PAGE_SIZE]` words of keys and `[units of tokens, width]` words of
values, a word being one fp32 or two bf16: two neighbouring numbers of a key, or the same number of
two neighbouring tokens' values. So a stored word is directly an operand of `simd.multiply_add`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import simd
from .flash import PAGE_SIZE
from .jit_cache import compiled, intrinsic
from .scalars import narrow, widen
from .simd import FAST, FLOAT, FLOATS, INT, INTS, LANES, WORD
from .thread_pool import parallel_for

TOKENS_AT_ONCE = 16
# From this many tokens of a page on, a 16 x 16 transpose pays off; fewer are written one by one.
MIN_TRANSPOSED = 3


@compiled
def store_qkv(
    words: Any,
    qkv: Any,  # [T, (Hq + 2·Hkv)·D]
    bits: Any,
    row_words: Any,  # [T · (Hq + 2·Hkv) · units] int32
    cos_sin: Any,  # [T, 2·R] float32
    query_weight: Any,  # [D] float32, or empty for no norm
    key_weight: Any,
    eps: Any,
    slots: Any,  # [T] int32
    query: Any,  # [T, Hq, D]
    query_words: Any,
    keys: Any,  # [pages, Hkv, units, PAGE_SIZE] int32
    values: Any,  # [pages, Hkv, units of tokens, width] int32
) -> None:
    """Split, norm and rotate; write the queries out, keys and values to their slots.

    `bits` are those of `qkv` as integers, `row_words` and `query_words` all words of it and of
    `query`.
    """
    items = (len(qkv) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    arguments = (
        *(qkv, bits, row_words, cos_sin, query_weight, key_weight, eps),
        *(slots, query, query_words, keys, values),
    )
    parallel_for(words, items, _store_qkv_item, arguments)


@compiled
def store_kv(words: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    """Write words `key [T · Hkv · units]` and bits `value [T, Hkv · Dv]` to their slots."""
    items = (len(slots) + TOKENS_AT_ONCE - 1) // TOKENS_AT_ONCE
    parallel_for(words, items, _store_kv_item, (key, value, slots, keys, values))


@compiled
def _store_qkv_item(
    item: Any,
    qkv: Any,
    bits: Any,
    row_words: Any,
    cos_sin: Any,
    query_weight: Any,
    key_weight: Any,
    eps: Any,
    slots: Any,
    query: Any,
    query_words: Any,
    keys: Any,
    values: Any,
) -> None:
    query_heads, width = query.shape[1:]
    heads, units = keys.shape[1:3]
    first_key, first_value = query_heads * width, (query_heads + heads) * width
    is_plain = cos_sin.shape[1] == 0 and len(query_weight) == 0
    row_units, query_units = (query_heads + 2 * heads) * units, query_heads * units
    rotated = np.empty(PAGE_SIZE * heads * width, qkv.dtype)
    rotated_words = rotated.view(np.int32)
    token, stop = _first_of_page(slots, item), _first_of_page(slots, item + 1)
    while token < stop:
        count = _run(slots, token, stop)
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        for i in range(count):
            if is_plain:
                at = (token + i) * row_units
                copy_words(row_words, at, query_words, (token + i) * query_units, query_units)
                continue
            row, own_cos_sin = qkv[token + i], cos_sin[token + i]
            out = query[token + i].reshape(-1)
            _rotate_heads(row, 0, own_cos_sin, query_weight, eps, out, width)
            out = rotated[i * heads * width : (i + 1) * heads * width]
            _rotate_heads(row, first_key, own_cos_sin, key_weight, eps, out, width)
        if is_plain:
            at = token * row_units + query_units
            _store_keys(row_words, at, row_units, count, page, offset, keys)
        else:
            _store_keys(rotated_words, 0, heads * units, count, page, offset, keys)
        _store_values(bits, token, first_value, width, count, page, offset, values)
        token += count


@compiled
def _first_of_page(slots: Any, item: Any) -> Any:
    """Return the first token of a work item: no two items write to the same page."""
    token = min(item * TOKENS_AT_ONCE, len(slots))
    while 0 < token < len(slots) and (
        slots[token] % PAGE_SIZE != 0 and slots[token] == slots[token - 1] + 1
    ):
        token += 1
    return token


@compiled
def _run(slots: Any, token: Any, stop: Any) -> Any:
    """Return the number of tokens from this one on that are contiguous in one page."""
    count = 1
    room = PAGE_SIZE - slots[token] % PAGE_SIZE
    while count < room and token + count < stop and slots[token + count] == slots[token] + count:
        count += 1
    return count


@compiled
def _rotate_heads(
    row: Any, first: Any, cos_sin: Any, weight: Any, eps: Any, out: Any, width: Any
) -> None:
    """Norm heads if there is a weight, and rotate the first numbers of each (RoPE)."""
    half = len(cos_sin) // 2
    if width % LANES == 0 and half % LANES == 0:
        for start in range(0, len(out), width):
            rotate_head(
                row, first + start, cos_sin, half, weight, len(weight), eps, out, start, width
            )
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
            cos, sin = cos_sin[d], cos_sin[half + d]
            head[d] = one * cos - other * sin
            head[half + d] = other * cos + one * sin
        for d in range(width):
            out[start + d] = narrow(head[d], row[0])


@intrinsic
def rotate_head(
    _typing: Any,
    row: Any,
    _first: Any,
    cos_sin: Any,
    _half: Any,
    weight: Any,
    _num_weights: Any,
    _eps: Any,
    out: Any,
    _start: Any,
    _width: Any,
) -> Any:
    """Norm and rotate one head whose widths are whole vectors, as `_rotate_heads` does for any."""
    int64 = types.int64
    signature = types.void(
        row, int64, cos_sin, int64, weight, int64, types.float32, out, int64, int64
    )

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = FLOAT if row.dtype == types.float32 else simd.HALVES.element
        numbers = ir.VectorType(number, LANES)

        def pointer(index: int, element: Any) -> Any:
            kind = signature.args[index]
            return simd.pointer_to(context, builder, kind, args[index], element)

        source = builder.gep(pointer(0, number), [args[1]])
        target = builder.gep(pointer(7, number), [args[8]])
        own_cos_sin, weights = pointer(2, FLOAT), pointer(4, FLOAT)
        half, width = args[3], args[9]

        def word(value: int) -> Any:
            return ir.Constant(WORD, value)

        def loaded(at: Any) -> Any:
            lanes = simd.load(builder, source, at, numbers)
            return lanes if number is FLOAT else builder.fpext(lanes, FLOATS)

        def stored(lanes: Any, at: Any) -> None:
            lanes = lanes if number is FLOAT else simd.round_to_bf16(builder, lanes)
            simd.store(builder, lanes, target, at)

        is_normed = builder.icmp_signed(">", args[5], word(0))
        total = cgutils.alloca_once_value(builder, simd.floats(0))
        builder.store(simd.floats(0), total)
        with (
            builder.if_then(is_normed),
            simd.repeated(builder, builder.udiv(width, word(LANES))) as number_,
        ):
            lanes = loaded(builder.mul(number_, word(LANES)))
            squares = builder.fmul(lanes, lanes, FAST)
            builder.store(builder.fadd(builder.load(total), squares, FAST), total)
        mean = builder.fdiv(
            simd.over_lanes(builder, builder.load(total), builder.fadd),
            simd.splat(builder, builder.sitofp(width, FLOAT), FLOATS),
        )
        mean = builder.fadd(mean, simd.splat(builder, args[6], FLOATS))
        root = simd.call(builder, "llvm.sqrt.v16f32", FLOATS, mean)
        scale = builder.fdiv(simd.floats(1), root)

        def normed(at: Any) -> Any:
            place = cgutils.alloca_once(builder, FLOATS)
            builder.store(loaded(at), place)
            with builder.if_then(is_normed):
                factor = builder.fmul(scale, simd.load(builder, weights, at, FLOATS), FAST)
                builder.store(builder.fmul(builder.load(place), factor, FAST), place)
            return builder.load(place)

        with simd.repeated(builder, builder.udiv(half, word(LANES))) as number_:
            at = builder.mul(number_, word(LANES))
            beyond = builder.add(at, half)
            one, other = normed(at), normed(beyond)
            cos, sin = (simd.load(builder, own_cos_sin, place, FLOATS) for place in (at, beyond))
            products = [
                builder.fmul(a, b, FAST)
                for a, b in ((one, cos), (other, sin), (other, cos), (one, sin))
            ]
            stored(builder.fsub(products[0], products[1], FAST), at)
            stored(builder.fadd(products[2], products[3], FAST), beyond)
        rotated = builder.mul(half, word(2))
        rest = builder.udiv(builder.sub(width, rotated), word(LANES))
        with simd.repeated(builder, rest) as number_:
            at = builder.add(rotated, builder.mul(number_, word(LANES)))
            stored(normed(at), at)
        return context.get_dummy_value()

    return signature, generate


@compiled
def _store_kv_item(item: Any, key: Any, value: Any, slots: Any, keys: Any, values: Any) -> None:
    heads, units = keys.shape[1:3]
    width = value.shape[1] // heads
    token, stop = _first_of_page(slots, item), _first_of_page(slots, item + 1)
    while token < stop:
        count = _run(slots, token, stop)
        page, offset = slots[token] // PAGE_SIZE, slots[token] % PAGE_SIZE
        stride = heads * units
        _store_keys(key, token * stride, stride, count, page, offset, keys)
        _store_values(value, token, 0, width, count, page, offset, values)
        token += count


@compiled
def _store_keys(
    words: Any, at: Any, stride: Any, count: Any, page: Any, offset: Any, keys: Any
) -> None:
    """Write the words of some tokens' keys, each token's `stride` further, to one page."""
    heads, units = keys.shape[1:3]
    out = keys.reshape(-1)
    begin = np.int64(page) * heads * units * PAGE_SIZE
    if units % LANES == 0 and count >= MIN_TRANSPOSED:
        for unit in range(0, heads * units, LANES):
            place = begin + unit * PAGE_SIZE
            transpose_square(words, at + unit, stride, count, offset, out, place)
        return
    for i in range(count):
        for unit in range(heads * units):
            out[begin + unit * PAGE_SIZE + offset + i] = words[at + i * stride + unit]


@compiled
def _store_values(
    bits: Any, token: Any, first: Any, width: Any, count: Any, page: Any, offset: Any, values: Any
) -> None:
    """Write numbers `first …` of some tokens' rows as their values, one head after another.

    The first of two tokens in a word writes both. The other is the next row's if that is one of
    these, else zero, so that old contents are never read.
    """
    row, is_wide = bits.shape[1], width % LANES == 0
    for head in range(values.shape[1]):
        start = first + head * width
        for i in range(count):
            place, at = offset + i, (token + i) * row + start
            is_first, is_alone = place % 2 == 0, i + 1 == count
            if bits.itemsize == 4:
                copy_words(bits, at, values[page, head, place], 0, width)
            elif is_first and is_wide:
                after = at if is_alone else at + row
                join_pairs(bits, at, after, is_alone, values[page, head, place // 2], width)
            elif is_first:
                out = values[page, head, place // 2]
                for d in range(width):
                    other = np.uint32(0) if is_alone else np.uint32(bits[token + i + 1, start + d])
                    out[d] = np.uint32(bits[token + i, start + d]) | other << np.uint32(16)
            elif i == 0:
                out = values[page, head, place // 2]
                for d in range(width):
                    own = np.uint32(bits[token, start + d]) << np.uint32(16)
                    out[d] = np.uint32(out[d]) & np.uint32(0xFFFF) | own


@intrinsic
def join_pairs(
    _typing: Any, bits: Any, _at: Any, _after: Any, _is_alone: Any, target: Any, _width: Any
) -> Any:
    """Write two rows of bf16 as words, or the first with zeros where it `is_alone`."""
    int64 = types.int64
    signature = types.void(bits, int64, int64, types.boolean, target, int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if bits.dtype != types.uint16:  # never called
            return context.get_dummy_value()
        half = ir.IntType(16)
        halves = ir.VectorType(half, LANES)
        source = simd.pointer_to(context, builder, signature.args[0], args[0], half)
        out = simd.pointer_to(context, builder, signature.args[4], args[4], INT)
        shift = builder.select(args[3], ir.Constant(INT, 0), ir.Constant(INT, -1))
        kept = simd.splat(builder, shift, INTS)
        with simd.repeated(builder, builder.udiv(args[5], ir.Constant(WORD, LANES))) as number:
            at = builder.mul(number, ir.Constant(WORD, LANES))
            low, high = (
                builder.zext(simd.load(builder, source, builder.add(row, at), halves), INTS)
                for row in args[1:3]
            )
            high = builder.and_(builder.shl(high, simd.integers(16)), kept)
            simd.store(builder, builder.or_(low, high), out, at)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_words(_typing: Any, source: Any, _at: Any, target: Any, _to: Any, _count: Any) -> Any:
    """Copy some words."""
    int64 = types.int64
    signature = types.void(source, int64, target, int64, int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, out = (
            builder.gep(simd.pointer_to(context, builder, signature.args[i], args[i], INT), [at])
            for i, at in ((0, args[1]), (2, args[3]))
        )
        lanes = ir.Constant(WORD, LANES)
        with simd.repeated(builder, builder.udiv(args[4], lanes)) as number:
            place = builder.mul(number, lanes)
            simd.store(builder, simd.load(builder, words, place, INTS), out, place)
        rest = builder.urem(args[4], lanes)
        done = builder.sub(args[4], rest)
        with simd.repeated(builder, rest) as number:
            place = builder.add(done, number)
            builder.store(builder.load(builder.gep(words, [place])), builder.gep(out, [place]))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_square(
    _typing: Any,
    source: Any,  # words
    _at: Any,  # of the first token's
    _stride: Any,  # to the next one's
    _count: Any,  # tokens
    _offset: Any,  # of the first in its page
    target: Any,
    _to: Any,
) -> Any:
    """Write sixteen words of some tokens, word after word, into lanes from `offset` on."""
    int64 = types.int64
    signature = types.void(source, int64, int64, int64, int64, target, int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, stride, count, offset, _, to = args
        words, out = (
            simd.pointer_to(context, builder, signature.args[i], args[i], INT) for i in (0, 5)
        )
        zero, last = ir.Constant(WORD, 0), builder.sub(count, ir.Constant(WORD, 1))

        def row(lane: int) -> Any:
            # Lanes without a token get another's.
            number = builder.sub(ir.Constant(WORD, lane), offset)
            number = builder.select(builder.icmp_signed("<", number, zero), zero, number)
            number = builder.select(builder.icmp_signed(">", number, last), last, number)
            place = builder.add(at, builder.mul(number, stride))
            return simd.load(builder, words, place, INTS)

        square = simd.transposed(builder, [row(lane) for lane in range(LANES)])
        lanes = ir.Constant(INTS, [ir.Constant(INT, lane) for lane in range(LANES)])
        begin, end = (
            simd.splat(builder, builder.trunc(number, INT), INTS)
            for number in (offset, builder.add(offset, count))
        )
        is_written = builder.and_(
            builder.icmp_signed(">=", lanes, begin), builder.icmp_signed("<", lanes, end)
        )
        for unit, written in enumerate(square):
            place = builder.add(to, ir.Constant(WORD, unit * LANES))
            kept = simd.load(builder, out, place, INTS)
            simd.store(builder, builder.select(is_written, written, kept), out, place)
        return context.get_dummy_value()

    return signature, generate
