"""GEMM microkernel on the CPU: a few rows against one panel of packed weights, in SIMD registers.

A panel has as many outputs as the registers' accumulators have columns, and its words (see `simd`)
are stored input after input, so that it is read in one stream. Each sum adds its inputs in order,
so that a row's result does not depend on the other rows of the batch.

A word of int8 is four neighbouring inputs. VPDPBUSD multiplies unsigned by signed numbers, so rows
have a zero point of 128: the sums start at the negated contribution of that offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import simd
from .jit_cache import intrinsic
from .simd import BYTE, FAST, FLOAT, FLOATS, HALVES, INT, INTS, LANES, WORD

# Accumulators and their operands fill the 32 registers of AVX-512, or the 16 of AVX2, where a
# vector takes two.
COLUMNS = 2
ACCUMULATORS = 24 if simd.HAS_WIDE_VECTORS else 6
ROWS = ACCUMULATORS // (COLUMNS if simd.HAS_WIDE_VECTORS else 1)
WIDTH = COLUMNS * LANES
WORD_BYTES = 4
ZERO_POINT = 128
# Epilogue codes: activations of gates, which are the first half of a panel and multiply the second,
# or, with `ACTIVATION_ONLY` added, activations of all outputs.
BITS = ir.VectorType(ir.IntType(1), LANES)
NO_ACTIVATION = 0
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
ACTIVATION_ONLY = len(ACTIVATIONS)
# gelu's tanh as a sigmoid: x · sigmoid(2·√(2/π) · (x + 0.044715·x³)).
GELU_SLOPE, GELU_CUBE = 1.5957691216057308, 0.044715
# erfc(z) · exp(z²) of z >= 0 to 1.5e-7, in powers of 1 / (1 + ERF_POLE · z) from the first on
# (Abramowitz and Stegun, 7.1.26).
ERF_POLE = 0.3275911
ERF_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ROOT_HALF = 0.7071067811865476


@intrinsic
def multiply_panel(
    _typing: Any,
    like: Any,  # a number of `x`: fp32, bf16 as its bits, or uint8, whose outputs are bf16
    _x: Any,  # address of the first row's words
    _stride: Any,  # bytes from one row to the next
    _rows: Any,  # 1 to ROWS
    _units: Any,  # words of a row, one at least
    _scales: Any,  # address of the first row's scale, where `x` is uint8
    _panel: Any,  # address of [units, WIDTH] words
    _ahead: Any,  # address to prefetch from: `_ahead_step` bytes with each unit
    _ahead_step: Any,
    _more: Any,  # address of the first row's further words, those of its adapter; none of uint8
    _more_stride: Any,
    _more_units: Any,  # 0 if there are no more
    _more_panel: Any,  # address of the panel's further words
    _bias: Any,  # address of [WIDTH] fp32; for uint8 of [3, WIDTH]: biases, scales, int32 to add
    _out: Any,  # address of the first row's first output
    _out_stride: Any,  # bytes
    _count: Any,  # outputs that this panel has
    _curve: Any,
    _steepness: Any,
    _limit: Any,
    _lift: Any,
) -> Any:
    """Write x · panel + more · its panel + bias of a few rows, after the epilogue."""
    is_paired, is_int8 = like != types.float32, like == types.uint8
    numbers = [types.int64] * 17 + [types.float32] * 3
    signature = types.void(like, *numbers)

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, x, stride, rows, units, scales, panel, ahead, step, *others = args
        more, more_stride, more_units, more_panel, bias, out, out_stride, count, *gate = others
        sums = _space(builder, FLOAT, ROWS * WIDTH)
        product = _Int8Product(bias, scales) if is_int8 else _FloatProduct(is_paired)
        done = builder.append_basic_block("done")
        # Any other number of rows does nothing.
        choice = builder.switch(rows, done)
        for number in range(1, ROWS + 1):
            block = builder.append_basic_block(f"rows{number}")
            choice.add_case(_word(number), block)
            with builder.goto_block(block):
                first, second = (
                    ([_place(builder, *begin, _word(row), INT) for row in range(number)], *rest)
                    for begin, *rest in (
                        ((x, stride), units, panel, (ahead, step)),
                        ((more, more_stride), more_units, more_panel, None),
                    )
                )
                _sum(builder, (first,) if is_int8 else (first, second), sums, product)
                builder.branch(done)
        builder.position_at_end(done)
        target = (rows, out, out_stride, count)
        _finish(builder, sums, bias, target, gate, is_paired=is_paired)
        return context.get_dummy_value()

    return signature, generate


def _word(value: int) -> Any:
    return ir.Constant(WORD, value)


def _space(builder: Any, element: Any, count: int) -> Any:
    """Allocate aligned stack memory, once a call."""
    with builder.goto_entry_block():
        room = builder.alloca(element, count)
        room.align = LANES * WORD_BYTES
    return room


def _place(builder: Any, address: Any, stride: Any, index: Any, element: Any) -> Any:
    """Return the pointer `index` strides after an address."""
    beyond = builder.add(address, builder.mul(stride, index))
    return builder.inttoptr(beyond, element.as_pointer())


@dataclass(frozen=True, slots=True)
class _FloatProduct:
    """Sums of products of fp32, or of pairs of bf16."""

    is_paired: bool
    vector = FLOATS

    def start(self, _builder: Any, _column: int) -> Any:
        """Return the initial sums of sixteen outputs."""
        return simd.floats(0)

    def add(self, builder: Any, total: Any, x: Any, weights: Any) -> Any:
        """Return sums plus the products of words."""
        return simd.multiply_add(builder, total, x, weights, is_paired=self.is_paired)

    def scaled(self, _builder: Any, total: Any, _row: int, _column: int) -> Any:
        """Return the sums in fp32."""
        return total


@dataclass(frozen=True, slots=True)
class _Int8Product:
    """Sums of products of uint8 and int8; `multiply_panel` describes the layout of their scales."""

    outputs: Any
    rows: Any
    vector = INTS

    def start(self, builder: Any, column: int) -> Any:
        """Return the initial sums of sixteen outputs."""
        numbers = builder.inttoptr(self.outputs, INT.as_pointer())
        return simd.load(builder, numbers, _word(2 * WIDTH + column * LANES), INTS)

    def add(self, builder: Any, total: Any, x: Any, weights: Any) -> Any:
        """Return sums plus the products of words."""
        return simd.multiply_add_int8(builder, total, x, weights)

    def scaled(self, builder: Any, total: Any, row: int, column: int) -> Any:
        """Return the sums in fp32."""
        outputs = builder.inttoptr(self.outputs, FLOAT.as_pointer())
        own = simd.load(builder, outputs, _word(WIDTH + column * LANES), FLOATS)
        rows = builder.inttoptr(self.rows, FLOAT.as_pointer())
        of_row = simd.splat(builder, builder.load(builder.gep(rows, [_word(row)])), FLOATS)
        return builder.fmul(builder.sitofp(total, FLOATS), builder.fmul(of_row, own))


def _sum(builder: Any, parts: Any, sums: Any, product: _FloatProduct | _Int8Product) -> None:
    """Write the sums of some rows, row after row: `[rows, WIDTH]` fp32.

    Each part is the addresses of its rows' words, their number, its panel, and the prefetch
    address and step, if any.
    """
    at_once = min(COLUMNS, ACCUMULATORS // len(parts[0][0]))
    for first in range(0, COLUMNS, at_once):
        _sum_columns(builder, parts, sums, product, range(first, first + at_once))


def _sum_columns(
    builder: Any, parts: Any, sums: Any, product: _FloatProduct | _Int8Product, columns: range
) -> None:
    """Write the sums of some columns of vectors."""
    num_rows = len(parts[0][0])
    totals = {
        (row, column): cgutils.alloca_once(builder, product.vector)
        for row in range(num_rows)
        for column in columns
    }
    for (_, column), total in totals.items():
        builder.store(product.start(builder, column), total)
    for rows, units, panel, soon in parts:
        weights = builder.inttoptr(panel, INT.as_pointer())
        with cgutils.for_range(builder, units) as loop:
            at = builder.mul(loop.index, _word(WIDTH))
            words = {
                column: simd.load(builder, weights, builder.add(at, _word(column * LANES)), INTS)
                for column in columns
            }
            if soon is not None and not columns.start:
                ahead, step = soon
                first = builder.add(ahead, builder.mul(step, loop.index))
                for place in (first, builder.add(first, builder.lshr(step, _word(1)))):
                    _ask_for(builder, place)
            for row, place in enumerate(rows):
                x = simd.splat(builder, builder.load(builder.gep(place, [loop.index])), INTS)
                for column, word in words.items():
                    total = totals[row, column]
                    builder.store(product.add(builder, builder.load(total), x, word), total)
    for (row, column), total in totals.items():
        scaled = product.scaled(builder, builder.load(total), row, column)
        simd.store(builder, scaled, sums, _word(row * WIDTH + column * LANES))


def _ask_for(builder: Any, address: Any) -> None:
    """Prefetch a cache line into L2: L1 holds the rows."""
    place = builder.inttoptr(address, BYTE.as_pointer())
    flags = (ir.Constant(INT, flag) for flag in (0, 2, 1))
    simd.call(builder, "llvm.prefetch.p0", ir.VoidType(), place, *flags)


def _finish(builder: Any, sums: Any, bias: Any, target: Any, gate: Any, *, is_paired: bool) -> None:
    """Apply bias and epilogue to the sums and write the outputs, row after row."""
    rows, out, stride, count = target
    curve = gate[0]
    number = HALVES.element if is_paired else FLOAT
    size = 2 if is_paired else 4
    biases = builder.inttoptr(bias, FLOAT.as_pointer())
    # An incomplete row of a panel is assembled here.
    row_of_panel = _space(builder, number, WIDTH)
    is_alone = builder.icmp_signed(">", curve, _word(ACTIVATION_ONLY))
    is_gate = builder.and_(
        builder.icmp_signed("!=", curve, _word(NO_ACTIVATION)), builder.not_(is_alone)
    )
    own_curve = builder.select(is_alone, builder.sub(curve, _word(ACTIVATION_ONLY)), curve)
    width = builder.select(is_gate, _word(LANES), _word(WIDTH))
    is_whole = builder.icmp_signed("==", count, width)
    count_bytes = builder.mul(count, _word(size))
    with cgutils.for_range(builder, rows) as loop:
        place = _place(builder, out, stride, loop.index, number)
        written = builder.select(is_whole, place, row_of_panel)
        at = builder.mul(loop.index, _word(WIDTH))
        first, second = (
            builder.fadd(
                simd.load(builder, sums, builder.add(at, _word(column * LANES)), FLOATS),
                simd.load(builder, biases, _word(column * LANES), FLOATS),
            )
            for column in range(COLUMNS)
        )
        with builder.if_else(is_gate) as (joined, plain):
            with joined:
                opened = _gated(builder, first, second, *gate)
                _write(builder, opened, written, 0, is_paired=is_paired)
            with plain:
                lanes = [cgutils.alloca_once_value(builder, sum_) for sum_ in (first, second)]
                for place_, sum_ in zip(lanes, (first, second), strict=True):
                    builder.store(sum_, place_)
                with builder.if_then(is_alone):
                    for place_, sum_ in zip(lanes, (first, second), strict=True):
                        alpha = simd.splat(builder, gate[1], FLOATS)
                        bent = _activate(builder, sum_, own_curve, alpha)
                        builder.store(bent, place_)
                for column, place_ in enumerate(lanes):
                    bent = builder.load(place_)
                    _write(builder, bent, written, column * LANES, is_paired=is_paired)
        with builder.if_then(builder.not_(is_whole), likely=False):
            cgutils.raw_memcpy(builder, place, row_of_panel, count_bytes, 1)


def _write(builder: Any, lanes: Any, pointer: Any, index: int, *, is_paired: bool) -> None:
    """Write a vector in the dtype of `x`."""
    lanes = simd.round_to_bf16(builder, lanes) if is_paired else lanes
    simd.store(builder, lanes, pointer, _word(index))


def _gated(builder: Any, gate: Any, up: Any, curve: Any, alpha: Any, limit: Any, beta: Any) -> Any:
    """Return activation(gate) · (up + beta), clamped before: see `Gate`. NaN is preserved."""
    most = simd.splat(builder, limit, FLOATS)
    least = builder.fneg(most)
    gate, up = (builder.select(builder.fcmp_ordered("<", most, x), most, x) for x in (gate, up))
    up = builder.select(builder.fcmp_ordered("<", up, least), least, up)
    up = builder.fadd(up, simd.splat(builder, beta, FLOATS))
    bent = _activate(builder, gate, curve, simd.splat(builder, alpha, FLOATS))
    return builder.fmul(bent, up)


def _activate(builder: Any, x: Any, curve: Any, alpha: Any) -> Any:
    """Return an activation of x; NaN is preserved."""
    result = cgutils.alloca_once(builder, FLOATS)
    is_exact = builder.icmp_signed("==", curve, _word(ACTIVATIONS["gelu"]))
    with builder.if_else(is_exact) as (exact, sloped):
        with exact:
            builder.store(_gelu(builder, x), result)
        with sloped:
            builder.store(_sigmoid_gated(builder, x, curve, alpha), result)
    return builder.load(result)


def _gelu(builder: Any, x: Any) -> Any:
    """Return x · Φ(x), by the error function of -|x|, whose small values keep their digits."""
    size = builder.fmul(simd.call(builder, "llvm.fabs.v16f32", FLOATS, x), simd.floats(ROOT_HALF))
    pole = builder.fadd(simd.floats(1), builder.fmul(size, simd.floats(ERF_POLE), FAST), FAST)
    t = builder.fdiv(simd.floats(1), pole, FAST)
    total = simd.floats(0)
    for coefficient in reversed(ERF_COEFFICIENTS):
        total = builder.fmul(builder.fadd(total, simd.floats(coefficient), FAST), t, FAST)
    power = simd.exponential(builder, builder.fneg(builder.fmul(size, size)))
    tail = builder.fmul(builder.fmul(total, power, FAST), simd.floats(0.5), FAST)
    is_positive = builder.fcmp_ordered(">=", x, simd.floats(0))
    share = builder.select(is_positive, builder.fsub(simd.floats(1), tail), tail)
    return builder.fmul(x, share)


def _sigmoid_gated(builder: Any, gate: Any, curve: Any, alpha: Any) -> Any:
    """Return x · sigmoid(slope of x): silu, or gelu by the tanh approximation."""
    cube = builder.fmul(builder.fmul(gate, gate), gate)
    bent = builder.fadd(gate, builder.fmul(simd.floats(GELU_CUBE), cube, FAST), FAST)
    gelu = builder.fmul(simd.floats(GELU_SLOPE), bent)
    silu = builder.fmul(alpha, gate)
    is_tanh = builder.icmp_signed("==", curve, _word(ACTIVATIONS["gelu_tanh"]))
    is_gelu = simd.splat(builder, is_tanh, BITS)
    slope = builder.select(is_gelu, gelu, silu)
    is_rising = builder.fcmp_ordered(">=", slope, simd.floats(0))
    down = builder.select(is_rising, builder.fneg(slope), slope)
    power = simd.exponential(builder, down)
    top = builder.select(is_rising, simd.floats(1), power)
    share = builder.fdiv(top, builder.fadd(simd.floats(1), power), FAST)
    return builder.fmul(gate, share)
