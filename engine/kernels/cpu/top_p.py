"""Top-k and top-p thresholds of a row without a sort.

The threshold is bisected by the floats' order as integers (`scalars.order`): a pass over the row
narrows two bounds at four places at once. A sample of the row gives the first guess. Once only a
few numbers are between the bounds, they are copied out, and the search continues among these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from . import simd
from .jit_cache import compiled, intrinsic
from .scalars import order
from .simd import FLOAT, FLOATS, INTS, LANES, WORD

# Numbers that are summed in fp32; sums of tiles are added in fp64.
TILE = 1024
# Most numbers that are copied out, and size of the sample.
NUM_FEW = 8192
NUM_SAMPLED = 2048
# Standard deviations around the sample's estimate that are tried, too.
DEVIATIONS = 2.0
# Precision of the estimate in the order of floats: some 0.1 % of a number.
GRAIN = 2**13
# Tiles of which the greatest numbers are tried first.
NUM_PEAKS = 32


@compiled
def find_threshold(
    x: Any, peaks: Any, goal: Any, total: Any, highest: Any, few: Any, by_mass: Any
) -> Any:
    """Return the greatest `v` such that the numbers of `x [n]` from `v` up weigh at least `goal`.

    `v` is an order, as is `highest`, that of the greatest number. With `by_mass` a number weighs
    its value, where none is negative and the greatest is 1; otherwise each weighs 1. `total` is the
    sum of all weights. No number of a tile is above its peak. `few` has room for
    `NUM_FEW + LANES` numbers.
    """
    if goal <= 1:
        return np.int32(highest)
    low = np.int64(1 if by_mass else order(np.float32(-np.inf)))  # zero masses never count
    high, above = np.int64(highest) + 1, 0.0
    # A confident model reaches the goal within its likeliest few.
    wanted = min(NUM_PEAKS if by_mass else goal, len(peaks))
    likely = _bisect(peaks, np.float64(wanted), low, high, 0.0, by_mass=False)
    count = _copy_between(x, peaks, likely, np.int32(high), few)
    if count <= NUM_FEW:
        weight = np.float64(0)
        for i in range(count):
            weight += few[i] if by_mass else 1.0
        if weight >= goal:
            return _bisect(few[:count], goal, np.int64(likely), high, 0.0, by_mass)
        high, above = np.int64(likely), weight
    is_sampled = False
    while high - low > 1:
        count = _copy_between(x, peaks, np.int32(low), np.int32(high), few)
        if count <= NUM_FEW:
            return _bisect(few[:count], goal, low, high, above, by_mass)
        if is_sampled:
            places = _places(low, high)
        else:
            places = _sampled_places(x, goal / total, low, high, few[:NUM_SAMPLED], by_mass)
            is_sampled = True
        covered = _covered(x, places, by_mass)
        for j in range(4):
            if covered[j] >= goal:
                low = max(low, np.int64(places[j]))
            elif places[j] < high:
                high, above = np.int64(places[j]), covered[j]
    return np.int32(low)


@compiled
def _bisect(
    x: Any, goal: Any, low: Any, high: Any, above: Any, by_mass: Any, grain: Any = 1
) -> Any:
    """Bisect to one number, or to `grain`; numbers above `high`, not in `x`, weigh `above`."""
    while high - low > grain:
        places = _places(low, high)
        covered = _covered(x, places, by_mass)
        for j in range(4):
            if above + covered[j] >= goal:
                low = max(low, np.int64(places[j]))
            else:
                high = min(high, np.int64(places[j]))
    return np.int32(low)


@compiled
def _places(low: Any, high: Any) -> Any:
    step = high - low
    return (
        np.int32(low + step // 5),
        np.int32(low + step * 2 // 5),
        np.int32(low + step * 3 // 5),
        np.int32(low + step * 4 // 5),
    )


@compiled
def _sampled_places(x: Any, share: Any, low: Any, high: Any, sample: Any, by_mass: Any) -> Any:
    """Return the place where a sample reaches a share of its weight, and three around it."""
    stride = len(x) // len(sample)
    for i in range(len(sample)):
        sample[i] = x[i * stride]
    weight, top, bottom = np.float64(0), order(sample[0]), order(sample[0])
    for i in range(len(sample)):
        weight += sample[i] if by_mass else 1.0
        top = max(top, order(sample[i]))
        bottom = min(bottom, order(sample[i]))
    low, high = max(low, np.int64(bottom)), np.int64(top) + 1
    spread = DEVIATIONS * np.sqrt(share * (1 - share) / len(sample))
    same = _bisect(sample, weight * share, low, high, 0.0, by_mass, GRAIN)
    more = _bisect(
        sample, weight * min(share + spread, 1.0), low, np.int64(same) + GRAIN, 0.0, by_mass, GRAIN
    )
    less = _bisect(
        sample, weight * max(share - spread, 0.0), np.int64(same), high, 0.0, by_mass, GRAIN
    )
    return more, same, less, np.int32(top)


@compiled
def _covered(x: Any, places: Any, by_mass: Any) -> Any:
    """Return the total weight of the numbers from each of four places up."""
    a = b = c = d = np.float64(0)
    for start in range(0, len(x), TILE):
        tile = x[start : start + TILE]
        first, second = np.float32(0), np.float32(0)
        third, fourth = np.float32(0), np.float32(0)
        for i in range(len(tile)):
            key = order(tile[i])
            weight = tile[i] if by_mass else np.float32(1)
            first += weight if key >= places[0] else np.float32(0)
            second += weight if key >= places[1] else np.float32(0)
            third += weight if key >= places[2] else np.float32(0)
            fourth += weight if key >= places[3] else np.float32(0)
        a, b, c, d = a + first, b + second, c + third, d + fourth
    return a, b, c, d


@compiled
def _copy_between(x: Any, peaks: Any, low: Any, high: Any, few: Any) -> Any:
    """Copy the numbers of an order in `[low, high)` → how many; beyond `NUM_FEW` it gives up."""
    count = 0
    for tile in range(len(peaks)):
        if order(peaks[tile]) < low:
            continue
        for start in range(tile * TILE, (tile + 1) * TILE, LANES):
            count += _copy_lanes(x, start, low, high, few, count)
            if count > NUM_FEW:
                return count
    return count


@intrinsic
def _copy_lanes(
    _typing: Any, x: Any, _start: Any, _low: Any, _high: Any, few: Any, _count: Any
) -> Any:
    """Copy the part of `x[start : start + LANES]` in range to `few[count:]` → how many.

    `LANES` numbers of `few` are overwritten.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (
            simd.pointer_to(context, builder, signature.args[i], args[i], FLOAT) for i in (0, 4)
        )
        numbers = simd.load(builder, source, args[1], FLOATS)
        bits = builder.bitcast(numbers, INTS)
        is_negative = builder.icmp_signed("<", bits, simd.integers(0))
        keys = builder.select(is_negative, builder.sub(simd.integers(-(2**31)), bits), bits)
        low, high = (simd.splat(builder, bound, INTS) for bound in args[2:4])
        above, below = builder.icmp_signed(">=", keys, low), builder.icmp_signed("<", keys, high)
        is_between = builder.and_(above, below)
        name = f"llvm.experimental.vector.compress.v{LANES}f32"
        nothing = ir.Constant(FLOATS, ir.Undefined)
        chosen = simd.call(builder, name, FLOATS, numbers, is_between, nothing)
        simd.store(builder, chosen, target, args[5])
        flags = builder.bitcast(is_between, ir.IntType(LANES))
        return builder.zext(builder.ctpop(flags), WORD)

    return types.int64(x, types.int64, types.int32, types.int32, few, types.int64), generate
