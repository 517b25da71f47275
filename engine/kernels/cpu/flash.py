"""Flash attention's inner loop on the CPU: query rows against a KV block, in SIMD registers.

Scores, online softmax (Milakov and Gimelshein 2018; Dao et al., FlashAttention, 2022) and the
weighted sum of values, for one to four rows at a time. A row's result depends only on its query and
on its blocks, in order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import simd
from .jit_cache import intrinsic
from .simd import FAST, FLOAT, FLOATS, INT, INTS, LANES, WORD

LOWEST = np.float32(-1e30)
PAGE_SIZE = LANES
PAGES_AT_ONCE = 4
BLOCK = PAGE_SIZE * PAGES_AT_ONCE  # tokens
# Vectors of a value that are summed at once; fewer for the remainder.
COLUMNS_AT_ONCE = (4, 2, 1)


def _rows(count: int, pages: int = PAGES_AT_ONCE) -> Any:
    """Return the intrinsic that attends `count` rows to a block, and prefetches another.

    Only the block's first `pages` are read.
    """

    @intrinsic
    def attend(
        _typing: Any,
        like: Any,  # an element: fp32, or bf16 as its bits
        queries: Any,  # words, `units` to a row, the first of them at `query_at`
        _query_at: Any,
        _units: Any,
        keys: Any,  # words: a page and head is [units, PAGE_SIZE]
        values: Any,  # words: [units of tokens, width]
        places: Any,  # [4 · PAGES_AT_ONCE] the pages' in keys, in values, and another block's
        _num_tokens: Any,  # of the block, that any of the rows sees
        state: Any,  # fp32: a row's sum of values from `state_at` on, then its peak and its mass
        _state_at: Any,
        _width: Any,  # of a value, in whole vectors
        bounds: Any,  # int32: a row's first token and the one after its last, from `bounds_at` on
        _bounds_at: Any,
        _start: Any,  # of the block, in tokens
        _scaling: Any,
        _softcap: Any,
        bias: Any,  # fp32: added to a row's scores from `shifts` + `start` on, if there is any
        shifts: Any,  # int32: where in the bias a row's first token has its own
        _first_row: Any,  # among the shifts
    ) -> Any:
        is_paired = like == types.uint16
        int64, float32 = types.int64, types.float32
        signature = types.void(
            *(like, queries, int64, int64, keys, values, places, int64),
            *(state, int64, int64, bounds, int64, int64, float32, float32),
            *(bias, shifts, int64),
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def pointer(index: int, element: Any) -> Any:
                kind = signature.args[index]
                return simd.pointer_to(context, builder, kind, args[index], element)

            block = _Block(builder, (count, pages), args, is_paired=is_paired)
            size = context.make_array(signature.args[16])(context, builder, args[16]).nitems
            bias = pointer(16, FLOAT), pointer(17, INT), size
            scores = block.scores(pointer(1, INT), pointer(4, INT), pointer(6, WORD), bias)
            weights, shrinks = block.softmax_weights(scores, pointer(8, FLOAT), pointer(11, INT))
            block.accumulate_values(
                weights, shrinks, pointer(5, INT), pointer(6, WORD), pointer(8, FLOAT)
            )
            return context.get_dummy_value()

        return signature, generate

    return attend


class _Block:
    """Generator of the LLVM code for one block: for `count` rows and `pages` of it."""

    def __init__(self, builder: Any, size: tuple[int, int], args: Any, *, is_paired: bool) -> None:
        self._builder = builder
        self._count, self._pages = size
        self._is_paired = is_paired
        self._query_at, self._units, self._num_tokens = args[2], args[3], args[7]
        self._state_at, self._width = args[9], args[10]
        self._bounds_at, self._start, self._scaling, self._softcap = args[12:16]
        self._first_row = args[18]
        self._tokens_a_word = 2 if is_paired else 1
        self._stride = builder.add(self._width, _word(2))  # of a row's state

    def scores(
        self, queries: Any, keys: Any, places: Any, bias: tuple[Any, Any, Any]
    ) -> list[list[Any]]:
        """Return a row's scores in as many vectors as pages."""
        builder = self._builder
        totals = _zeros(builder, self._count, self._pages)
        pages, following = (
            [self._page(keys, places, first + page) for page in range(count)]
            for first, count in ((0, self._pages), (2 * PAGES_AT_ONCE, PAGES_AT_ONCE))
        )
        rows = [
            builder.gep(queries, [self._nth(self._query_at, row, self._units)])
            for row in range(self._count)
        ]
        with simd.repeated(builder, self._units) as unit:
            at = builder.mul(unit, _word(LANES))
            lanes = [simd.load(builder, page, at, INTS) for page in pages]
            for page in following:
                simd.prefetch(builder, page, at)
            for row, own in zip(rows, totals, strict=True):
                query = builder.load(builder.gep(row, [unit]))
                self._add(own, simd.splat(builder, query, INTS), lanes)
        return self._scaled([[builder.load(total) for total in own] for own in totals], *bias)

    def _scaled(
        self, scores: list[list[Any]], bias: Any, shifts: Any, size_of_bias: Any
    ) -> list[list[Any]]:
        builder = self._builder
        scaling = simd.splat(builder, self._scaling, FLOATS)
        size = self._count * self._pages
        scaled = cgutils.alloca_once(builder, FLOATS, size=_word(size))
        for index, score in enumerate(score for own in scores for score in own):
            place = builder.gep(scaled, [_word(index)])
            builder.store(builder.fmul(score, scaling, FAST), place)
        is_capped = builder.fcmp_ordered(">", self._softcap, ir.Constant(FLOAT, 0.0))
        with builder.if_then(is_capped, likely=False):
            cap = simd.splat(builder, self._softcap, FLOATS)
            with simd.repeated(builder, _word(size)) as index:
                place = builder.gep(scaled, [index])
                capped = _tanh(builder, builder.fdiv(builder.load(place), cap))
                builder.store(builder.fmul(cap, capped, FAST), place)
        is_biased = builder.icmp_signed(">", size_of_bias, _word(0))
        with builder.if_then(is_biased, likely=False), simd.repeated(builder, _word(size)) as index:
            row, page = (
                operation(index, _word(self._pages)) for operation in (builder.udiv, builder.urem)
            )
            shift = builder.load(builder.gep(shifts, [builder.add(self._first_row, row)]))
            at = builder.add(builder.sext(shift, WORD), self._start)
            at = builder.add(at, builder.mul(page, _word(PAGE_SIZE)))
            place = builder.gep(scaled, [index])
            lanes = simd.load(builder, bias, at, FLOATS)
            builder.store(builder.fadd(builder.load(place), lanes, FAST), place)
        return [
            [
                builder.load(builder.gep(scaled, [_word(row * self._pages + page)]))
                for page in range(self._pages)
            ]
            for row in range(self._count)
        ]

    def softmax_weights(
        self, scores: list[list[Any]], state: Any, bounds: Any
    ) -> tuple[Any, list[Any]]:
        """Turn scores into softmax weights, in words; return them and the rescale factors."""
        builder = self._builder
        number = simd.HALVES.element if self._is_paired else FLOAT
        weights = cgutils.alloca_once(builder, number, size=_word(self._count * BLOCK))
        shrinks = []
        for row, own in enumerate(scores):
            seen = self._visible_lanes(bounds, row)
            lowest = simd.floats(float(LOWEST))
            masked = [
                builder.select(mask, score, lowest) for mask, score in zip(seen, own, strict=True)
            ]
            peak_at = builder.add(self._nth(self._state_at, row, self._stride), self._width)
            peak_place, mass_place = (
                builder.gep(state, [builder.add(peak_at, _word(i))]) for i in range(2)
            )
            before = simd.splat(builder, builder.load(peak_place), FLOATS)
            most = before
            for score in masked:
                most = _larger(builder, score, most)
            peak = simd.over_lanes(builder, most, partial(_larger, builder))
            shrink = simd.exponential(builder, builder.fsub(before, peak))
            total = simd.floats(0)
            for page, (mask, score) in enumerate(zip(seen, masked, strict=True)):
                weight = simd.exponential(builder, builder.fsub(score, peak))
                weight = builder.select(mask, weight, simd.floats(0))
                total = builder.fadd(total, weight)
                if self._is_paired:
                    weight = simd.round_to_bf16(builder, weight)
                at = _word(row * BLOCK + page * PAGE_SIZE)
                simd.store(builder, weight, weights, at)
            added = simd.over_lanes(builder, total, builder.fadd)
            mass = simd.splat(builder, builder.load(mass_place), FLOATS)
            mass = builder.fadd(builder.fmul(mass, shrink, FAST), added, FAST)
            for place, lanes in ((peak_place, peak), (mass_place, mass)):
                builder.store(builder.extract_element(lanes, ir.Constant(INT, 0)), place)
            shrinks.append(shrink)
        return builder.bitcast(weights, INT.as_pointer()), shrinks

    def accumulate_values(
        self, weights: Any, shrinks: list[Any], values: Any, places: Any, state: Any
    ) -> None:
        """Add the block's values by their weights to each row's sum."""
        builder = self._builder
        first = _word(0)
        for columns in COLUMNS_AT_ONCE:
            step = _word(columns * LANES)
            stop = builder.sub(self._width, builder.urem(self._width, step))
            with simd.repeated(builder, builder.udiv(builder.sub(stop, first), step)) as number:
                column = builder.add(first, builder.mul(number, step))
                self._mix_columns(weights, shrinks, values, places, state, column, columns)
            first = stop

    def _mix_columns(
        self,
        weights: Any,
        shrinks: list[Any],
        values: Any,
        places: Any,
        state: Any,
        first: Any,
        count: int,
    ) -> None:
        builder = self._builder
        offsets = [builder.add(first, _word(LANES * column)) for column in range(count)]
        totals = _zeros(builder, self._count, count)
        rows = [
            builder.gep(state, [self._nth(self._state_at, row, self._stride)])
            for row in range(self._count)
        ]
        for row, own, shrink in zip(rows, totals, shrinks, strict=True):
            for total, offset in zip(own, offsets, strict=True):
                before = simd.load(builder, row, offset, FLOATS)
                builder.store(builder.fmul(before, shrink, FAST), total)
        units = PAGE_SIZE // self._tokens_a_word
        rounded = builder.add(self._num_tokens, _word(self._tokens_a_word - 1))
        wanted = builder.udiv(rounded, _word(self._tokens_a_word))
        with simd.repeated(builder, _word(self._pages)) as page:
            before = builder.mul(page, _word(units))
            left = builder.sub(wanted, before)
            is_last = builder.icmp_signed("<", left, _word(units))
            current, following = (
                self._page(values, places, builder.add(page, _word(at)))
                for at in (PAGES_AT_ONCE, 3 * PAGES_AT_ONCE)
            )
            with simd.repeated(builder, builder.select(is_last, left, _word(units))) as unit:
                at = builder.mul(unit, self._width)
                places_ = [builder.add(at, offset) for offset in offsets]
                lanes = [simd.load(builder, current, place, INTS) for place in places_]
                for place in places_:
                    simd.prefetch(builder, following, place)
                for row, own in enumerate(totals):
                    index = builder.add(
                        builder.add(before, unit), _word(row * units * PAGES_AT_ONCE)
                    )
                    weight = builder.load(builder.gep(weights, [index]))
                    self._add(own, simd.splat(builder, weight, INTS), lanes)
        for row, own in zip(rows, totals, strict=True):
            for total, offset in zip(own, offsets, strict=True):
                simd.store(builder, builder.load(total), row, offset)

    def _add(self, totals: list[Any], factor: Any, lanes: list[Any]) -> None:
        for total, words in zip(totals, lanes, strict=True):
            added = simd.multiply_add(
                self._builder,
                self._builder.load(total),
                factor,
                words,
                is_paired=self._is_paired,
            )
            self._builder.store(added, total)

    def _visible_lanes(self, bounds: Any, row: int) -> list[Any]:
        """Return, page by page, which tokens a row sees."""
        builder = self._builder
        at = builder.add(self._bounds_at, _word(2 * row))
        start = builder.trunc(self._start, INT)
        first, stop = (
            simd.splat(
                builder,
                builder.sub(builder.load(builder.gep(bounds, [builder.add(at, _word(i))])), start),
                INTS,
            )
            for i in range(2)
        )
        masks = []
        for page in range(self._pages):
            tokens = ir.Constant(
                INTS, [ir.Constant(INT, page * PAGE_SIZE + lane) for lane in range(LANES)]
            )
            masks.append(
                builder.and_(
                    builder.icmp_signed(">=", tokens, first),
                    builder.icmp_signed("<", tokens, stop),
                )
            )
        return masks

    def _page(self, words: Any, places: Any, index: Any) -> Any:
        """Return the pointer to the page whose offset is number `index` of the places."""
        builder = self._builder
        index = _word(index) if isinstance(index, int) else index
        return builder.gep(words, [builder.load(builder.gep(places, [index]))])

    def _nth(self, first: Any, row: int, stride: Any) -> Any:
        return self._builder.add(first, self._builder.mul(_word(row), stride))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of two numbers, `b` if `a` is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _word(value: int) -> Any:
    return ir.Constant(WORD, value)


def _zeros(builder: Any, rows: int, columns: int) -> list[list[Any]]:
    """Return variables for vectors, which LLVM keeps in registers, set to zero."""
    places = [[cgutils.alloca_once(builder, FLOATS) for _ in range(columns)] for _ in range(rows)]
    for row in places:
        for place in row:
            builder.store(simd.floats(0), place)
    return places


def _tanh(builder: Any, x: Any) -> Any:
    absolute = simd.call(builder, "llvm.fabs.v16f32", FLOATS, x)
    e = simd.exponential(builder, builder.fmul(simd.floats(-2.0), absolute))
    one = simd.floats(1.0)
    y = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    return simd.call(builder, "llvm.copysign.v16f32", FLOATS, y, x)


attend_one, attend_two, attend_four = _rows(1), _rows(2), _rows(4)
# For a block of which at most half is visible: most sequences end in one, short ones begin in one.
HALF = BLOCK // 2
attend_two_to_half = _rows(2, PAGES_AT_ONCE // 2)
attend_four_to_half = _rows(4, PAGES_AT_ONCE // 2)
