"""Probability maps: pure functions from the probabilities of options to calibrated ones."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LEAST_PROBABILITY: Final = 1e-12
"""Probabilities below this bound are treated as equal to it."""

Probabilities = Sequence[float]
"""One probability for each option of a question, in the order of the options."""


@dataclass(frozen=True, slots=True)
class LinearMap:
    """Softmax of `scale` × log-probability + offset.

    Its special cases are temperature scaling (no offsets), Platt scaling (two options) and batch
    calibration (scale 1).
    """

    scale: float
    offsets: tuple[float, ...]

    def __call__(self, probabilities: Probabilities) -> list[float]:
        """Return the calibrated probabilities."""
        pairs = zip(logarithms(probabilities), self.offsets, strict=True)
        return softmax([self.scale * log + offset for log, offset in pairs])

    def as_json(self) -> dict[str, Any]:
        """Return the value that `parse_map` reads."""
        return {"scale": self.scale, "offsets": [*self.offsets]}


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising curve through points, linear between them and constant outside of them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __call__(self, x: float) -> float:
        """Return the value at a place."""
        right = bisect_right(self.xs, x)
        if right == 0:
            return self.ys[0]
        if right == len(self.xs):
            return self.ys[-1]
        x0, x1, y0, y1 = *self.xs[right - 1 : right + 1], *self.ys[right - 1 : right + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class IsotonicMap:
    """A curve for each option over its log-odds, normalized to a sum of 1."""

    curves: tuple[Curve, ...]

    def __call__(self, probabilities: Probabilities) -> list[float]:
        """Return the calibrated probabilities."""
        pairs = zip(probabilities, self.curves, strict=True)
        values = [curve(log_odds(probability)) for probability, curve in pairs]
        total = math.fsum(values)
        return [value / total for value in values]

    def as_json(self) -> dict[str, Any]:
        """Return the value that `parse_map` reads."""
        return {"curves": [{"x": [*each.xs], "y": [*each.ys]} for each in self.curves]}


ProbabilityMap = LinearMap | IsotonicMap


def parse_map(value: Mapping[str, Any], num_options: int) -> ProbabilityMap:
    """Return the map of a JSON value; raises ValueError unless it fits this many options."""
    if "curves" in value:
        curves = tuple(_curve(each["x"], each["y"]) for each in value["curves"])
        if len(curves) != num_options:
            raise ValueError(f"{len(curves)} curves for {num_options} options")
        return IsotonicMap(curves)
    found = LinearMap(_number(value["scale"]), tuple(map(_number, value["offsets"])))
    if len(found.offsets) != num_options:
        raise ValueError(f"{len(found.offsets)} offsets for {num_options} options")
    return found


def _curve(xs: Sequence[Any], ys: Sequence[Any]) -> Curve:
    curve = Curve(tuple(map(_number, xs)), tuple(map(_number, ys)))
    steps = zip(curve.xs, curve.xs[1:], strict=False)
    is_rising = all(before < after for before, after in steps)
    if not curve.xs or len(xs) != len(ys) or not is_rising:
        raise ValueError("a curve without points, or with unordered ones")
    if any(not 0 < y < 1 for y in curve.ys):
        raise ValueError("a curve that is not between 0 and 1")
    return curve


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def logarithms(probabilities: Probabilities) -> list[float]:
    """Return the logarithm of each probability."""
    return [math.log(max(LEAST_PROBABILITY, each)) for each in probabilities]


def log_odds(probability: float) -> float:
    """Return the logarithm of a probability's odds."""
    rest = max(LEAST_PROBABILITY, 1 - probability)
    return math.log(max(LEAST_PROBABILITY, probability)) - math.log(rest)


def softmax(values: Sequence[float]) -> list[float]:
    """Return the exponentials of the values, normalized to a sum of 1."""
    most = max(values)
    powers = [math.exp(value - most) for value in values]
    total = sum(powers)
    return [power / total for power in powers]
