"""State updates of recurrences on the CPU, a token at a time, in SIMD registers.

Some columns of a head's state `[height, stride]` are processed line after line. Sums over lines
stay in registers, so that each number of the state is read once or twice and written once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import simd
from .jit_cache import compiled, intrinsic
from .simd import FAST, FLOAT, FLOATS, LANES, WORD

INT64, FLOAT32 = types.int64, types.float32


class _Columns:
    """Generator of the LLVM code for `count` vectors of columns from one on."""

    def __init__(self, builder: Any, count: int, column: Any) -> None:
        self.builder = builder
        self._offsets = [
            builder.add(column, ir.Constant(WORD, number * LANES)) for number in range(count)
        ]

    def load(self, pointer: Any, at: Any = None) -> list[Any]:
        """Return the columns of a line that begins at `at`."""
        return [simd.load(self.builder, pointer, place, FLOATS) for place in self._places(at)]

    def store(self, vectors: list[Any], pointer: Any, at: Any = None) -> None:
        """Write the columns of a line that begins at `at`."""
        for vector, place in zip(vectors, self._places(at), strict=True):
            simd.store(self.builder, vector, pointer, place)

    def sums(self, start: list[Any] | None = None) -> list[Any]:
        """Return variables for sums, which LLVM keeps in registers."""
        places = [cgutils.alloca_once(self.builder, FLOATS) for _ in self._offsets]
        for number, place in enumerate(places):
            self.builder.store(simd.floats(0) if start is None else start[number], place)
        return places

    def add(self, sums: list[Any], factor: Any, vectors: list[Any]) -> None:
        """Add a factor times vectors to sums."""
        for place, vector in zip(sums, vectors, strict=True):
            total = self.multiply_add(self.builder.load(place), factor, vector)
            self.builder.store(total, place)

    def multiply_add(self, total: Any, factor: Any, vector: Any) -> Any:
        """Return a factor times a vector, plus a total."""
        return self.builder.fadd(self.builder.fmul(factor, vector, FAST), total, FAST)

    def number(self, pointer: Any, index: Any) -> Any:
        """Return one number of an array in every lane."""
        return simd.splat(
            self.builder, self.builder.load(self.builder.gep(pointer, [index])), FLOATS
        )

    def _places(self, at: Any) -> list[Any]:
        if at is None:
            return self._offsets
        return [self.builder.add(at, offset) for offset in self._offsets]


def _delta(count: int) -> Any:
    """Return the intrinsic of the gated delta rule for a number of vectors of columns."""

    @intrinsic
    def update(
        _typing: Any,
        state: Any,  # fp32: lines of `stride` numbers from `_at` on
        _at: Any,
        _height: Any,
        _stride: Any,
        key: Any,  # [height]
        query: Any,  # [height]
        value: Any,  # [stride]
        out: Any,  # [stride]
        _column: Any,
        _decay: Any,
        _beta: Any,
    ) -> Any:
        sizes = (INT64, INT64, INT64)
        arrays = (key, query, value, out)
        signature = types.void(state, *sizes, *arrays, INT64, FLOAT32, FLOAT32)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = partial(_pointer, context, builder, signature, args)
            columns = _Columns(builder, count, args[8])
            lines, keys = pointer(0), pointer(4)
            decay, beta = (simd.splat(builder, args[number], FLOATS) for number in (9, 10))
            known = columns.sums()
            with simd.repeated(builder, args[2]) as line:
                at = builder.add(args[1], builder.mul(line, args[3]))
                columns.add(known, columns.number(keys, line), columns.load(lines, at))
            errors = []
            for wanted, place in zip(columns.load(pointer(6)), known, strict=True):
                expected = builder.fmul(decay, builder.load(place), FAST)
                errors.append(builder.fmul(beta, builder.fsub(wanted, expected, FAST), FAST))
            mixed = columns.sums()
            with simd.repeated(builder, args[2]) as line:
                at = builder.add(args[1], builder.mul(line, args[3]))
                factor = columns.number(keys, line)
                updated = [
                    columns.multiply_add(builder.fmul(decay, before, FAST), factor, error)
                    for before, error in zip(columns.load(lines, at), errors, strict=True)
                ]
                columns.store(updated, lines, at)
                columns.add(mixed, columns.number(pointer(5), line), updated)
            columns.store([builder.load(place) for place in mixed], pointer(7))
            return context.get_dummy_value()

        return signature, generate

    return update


def _space(count: int) -> Any:
    """Return the intrinsic of a state space for a number of vectors of columns."""

    @intrinsic
    def update(
        _typing: Any,
        state: Any,  # fp32: lines of `stride` numbers from `_at` on
        _at: Any,
        _height: Any,
        _stride: Any,
        b: Any,  # [height]
        c: Any,  # [height]
        x: Any,  # [stride]
        out: Any,  # [stride], added to
        _column: Any,
        _decay: Any,
    ) -> Any:
        arrays = (b, c, x, out)
        signature = types.void(state, INT64, INT64, INT64, *arrays, INT64, FLOAT32)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = partial(_pointer, context, builder, signature, args)
            columns = _Columns(builder, count, args[8])
            lines, decay = pointer(0), simd.splat(builder, args[9], FLOATS)
            inputs = columns.load(pointer(6))
            sums = columns.sums(columns.load(pointer(7)))
            with simd.repeated(builder, args[2]) as line:
                at = builder.add(args[1], builder.mul(line, args[3]))
                factor = columns.number(pointer(4), line)
                updated = [
                    columns.multiply_add(builder.fmul(decay, before, FAST), factor, added)
                    for before, added in zip(columns.load(lines, at), inputs, strict=True)
                ]
                columns.store(updated, lines, at)
                columns.add(sums, columns.number(pointer(5), line), updated)
            columns.store([builder.load(place) for place in sums], pointer(7))
            return context.get_dummy_value()

        return signature, generate

    return update


def _pointer(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return simd.pointer_to(context, builder, signature.args[index], args[index], FLOAT)


_delta_four, _delta_one = _delta(4), _delta(1)
_space_four, _space_one = _space(4), _space(1)


@compiled
def update_delta(
    state: Any,
    at: Any,
    height: Any,
    stride: Any,
    key: Any,
    query: Any,
    value: Any,
    out: Any,
    decay: Any,
    beta: Any,
) -> None:
    """Apply the gated delta rule to a head's state: see `GatedDelta`; `out` is qᵀS."""
    column = 0
    while column + 4 * LANES <= stride:
        _delta_four(state, at, height, stride, key, query, value, out, column, decay, beta)
        column += 4 * LANES
    while column < stride:
        _delta_one(state, at, height, stride, key, query, value, out, column, decay, beta)
        column += LANES


@compiled
def update_space(
    state: Any,
    at: Any,
    height: Any,
    stride: Any,
    b: Any,
    c: Any,
    x: Any,
    out: Any,
    decay: Any,
) -> None:
    """Apply a state space to a head's state: S ← decay·S + B ⊗ x; C·S is added to `out`."""
    column = 0
    while column + 4 * LANES <= stride:
        _space_four(state, at, height, stride, b, c, x, out, column, decay)
        column += 4 * LANES
    while column < stride:
        _space_one(state, at, height, stride, b, c, x, out, column, decay)
        column += LANES
