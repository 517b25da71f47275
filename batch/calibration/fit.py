"""Fit of probability maps: on the mean of all rows, or on rows with gold answers.

It is pure Python, since a Lambda writes the tables of drops: scikit-learn and scipy would add 194
MB for two short fits with the same results. Every fit is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Final

from .probability_maps import (
    Curve,
    IsotonicMap,
    LinearMap,
    Probabilities,
    ProbabilityMap,
    log_odds,
    logarithms,
    softmax,
)

NUM_FOLDS: Final = 5
_RIDGE: Final = 0.1  # keeps the parameters finite if the gold answers are separable
_MAX_STEPS: Final = 50
_MAX_HALVINGS: Final = 30
_TOLERANCE: Final = 1e-8
_MAX_POINTS: Final = 256

Fit = Callable[[Sequence[Probabilities], Sequence[int]], ProbabilityMap]
"""Fits a map to probabilities and the index of each row's gold option."""


class LogMeans:
    """Mean log-probability of each option over all rows, in constant memory."""

    def __init__(self, num_options: int) -> None:
        self.num_rows = 0
        self._sums = [0.0] * num_options

    def add(self, probabilities: Probabilities) -> None:
        """Add a row."""
        self.num_rows += 1
        logs = logarithms(probabilities)
        self._sums = [total + log for total, log in zip(self._sums, logs, strict=True)]

    def batch_map(self, prior: Sequence[float]) -> LinearMap:
        """Return batch calibration with a prior (Zhou et al. 2023, arXiv 2309.17249).

        It subtracts the mean of each option and adds the logarithm of the option's prior.
        """
        pairs = zip(self._sums, logarithms(prior), strict=True)
        return LinearMap(1.0, tuple(log - total / max(1, self.num_rows) for total, log in pairs))


def fit_platt(rows: Sequence[Probabilities], gold: Sequence[int]) -> LinearMap:
    """Return the linear map of the greatest likelihood, with a weak ridge and no negative scale.

    With two options this is Platt scaling, with more of them temperature scaling with a bias for
    each option. The ridge applies to standardized log-probabilities: those of a model may differ
    by hundredths from row to row, and need a large scale.
    """
    logs = [_centered(logarithms(row)) for row in rows]
    count = len(logs)
    means = [math.fsum(column) / count for column in zip(*logs, strict=True)]
    moved = [[log - mean for log, mean in zip(row, means, strict=True)] for row in logs]
    spread = math.sqrt(math.fsum(_dot(row, row) for row in moved) / (count * len(means))) or 1.0
    standard = [[each / spread for each in row] for row in moved]
    scale, *biases = _LogLikelihood(standard, gold).maximum(has_scale=True)
    if scale < 0:
        scale, *biases = _LogLikelihood(standard, gold).maximum(has_scale=False)
    scale /= spread
    pairs = zip(biases, means, strict=True)
    return LinearMap(scale, tuple(bias - scale * mean for bias, mean in pairs))


def _centered(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


class _LogLikelihood:
    """Negative log-likelihood of gold options with a ridge.

    Parameters are a scale and a bias for each option; the ridge pulls the scale to 1 and biases
    to 0.
    """

    def __init__(self, rows: Sequence[Sequence[float]], gold: Sequence[int]) -> None:
        self._rows = rows
        self._gold = gold

    def maximum(self, *, has_scale: bool) -> list[float]:
        """Return the parameters by Newton's method with conjugate gradients; O(rows × options)."""
        point = [1.0 if has_scale else 0.0] + [0.0] * len(self._rows[0])
        loss, shares = self._loss(point)
        for _ in range(_MAX_STEPS):
            gradient = self._gradient(point, shares, has_scale=has_scale)
            if max(map(abs, gradient)) <= _TOLERANCE * len(self._rows):
                break
            step = self._newton_step(gradient, shares, has_scale=has_scale)
            slope = _dot(gradient, step)
            size = 1.0
            for _ in range(_MAX_HALVINGS):
                moved = [at - size * move for at, move in zip(point, step, strict=True)]
                new_loss, new_shares = self._loss(moved)
                if new_loss <= loss - 1e-4 * size * slope:
                    break
                size /= 2
            else:
                break
            point, loss, shares = moved, new_loss, new_shares
        return point

    def _loss(self, point: Sequence[float]) -> tuple[float, list[list[float]]]:
        scale, *biases = point
        shares = [
            softmax([scale * x + bias for x, bias in zip(row, biases, strict=True)])
            for row in self._rows
        ]
        pairs = zip(shares, self._gold, strict=True)
        loss = -math.fsum(math.log(max(1e-300, share[index])) for share, index in pairs)
        return loss + _RIDGE / 2 * (_dot(biases, biases) + (scale - 1) ** 2), shares

    def _gradient(
        self, point: Sequence[float], shares: list[list[float]], *, has_scale: bool
    ) -> list[float]:
        scale, *biases = point
        slope, sums = _RIDGE * (scale - 1), [_RIDGE * bias for bias in biases]
        for row, share, index in zip(self._rows, shares, self._gold, strict=True):
            slope += _dot(share, row) - row[index]
            sums = [total + each for total, each in zip(sums, share, strict=True)]
            sums[index] -= 1
        return [slope if has_scale else 0.0, *sums]

    def _newton_step(
        self, gradient: list[float], shares: list[list[float]], *, has_scale: bool
    ) -> list[float]:
        """Return the solution of Hessian × step = gradient by conjugate gradients."""
        step, rest = [0.0] * len(gradient), gradient
        along, size = rest, _dot(rest, rest)
        bound = 1e-12 * size
        for _ in range(len(gradient)):
            if size <= bound:
                break
            bent = self._curvature(along, shares, has_scale=has_scale)
            length = size / _dot(along, bent)
            step = [at + length * move for at, move in zip(step, along, strict=True)]
            rest = [at - length * move for at, move in zip(rest, bent, strict=True)]
            before, size = size, _dot(rest, rest)
            along = [at + size / before * move for at, move in zip(rest, along, strict=True)]
        return step

    def _curvature(
        self, along: Sequence[float], shares: list[list[float]], *, has_scale: bool
    ) -> list[float]:
        """Return the product of the Hessian and a vector."""
        first, *others = along
        slope, sums = _RIDGE * first, [_RIDGE * other for other in others]
        for row, share in zip(self._rows, shares, strict=True):
            moves = [first * x + other for x, other in zip(row, others, strict=True)]
            mean = _dot(share, moves)
            bent = [weight * (move - mean) for weight, move in zip(share, moves, strict=True)]
            slope += _dot(bent, row)
            sums = [total + each for total, each in zip(sums, bent, strict=True)]
        return [slope if has_scale else 0.0, *sums]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(float.__mul__, one, other))


def fit_isotonic(rows: Sequence[Probabilities], gold: Sequence[int]) -> IsotonicMap:
    """Return the rising curve of least squares for each option, over its log-odds.

    The curves stay between 1/(n + 2) and 1 - 1/(n + 2) for n rows, since no finite number of rows
    proves a certainty.
    """
    return IsotonicMap(
        tuple(
            _isotonic_curve([log_odds(row[option]) for row in rows], [g == option for g in gold])
            for option in range(len(rows[0]))
        )
    )


def _isotonic_curve(xs: Sequence[float], hits: Sequence[bool]) -> Curve:
    margin = 1 / (len(xs) + 2)
    points: list[tuple[float, float]] = []
    for low, high, mean in _thinned(pooled_blocks(xs, hits)):
        y = min(1 - margin, max(margin, mean))
        points += [(low, y)] if low == high else [(low, y), (high, y)]
    return Curve(tuple(x for x, _ in points), tuple(y for _, y in points))


def _thinned(blocks: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return at most `_MAX_POINTS` blocks, evenly spread and with both ends."""
    last, most = len(blocks) - 1, _MAX_POINTS - 1
    return blocks if last <= most else [blocks[last * at // most] for at in range(most + 1)]


def pooled_blocks(xs: Sequence[float], hits: Sequence[bool]) -> list[tuple[float, float, float]]:
    """Return blocks of equal means, which rise: first and last x, and the mean.

    Neighbors whose means do not rise are pooled (pool adjacent violators).
    """
    blocks: list[tuple[float, float, float, int]] = []  # first x, last x, sum, number
    for x, group in groupby(sorted(zip(xs, hits, strict=True)), lambda pair: pair[0]):
        found = [hit for _, hit in group]
        blocks.append((x, x, float(sum(found)), len(found)))
        while len(blocks) > 1:
            low, _, total, num = blocks[-2]
            _, high, more, added = blocks[-1]
            if total / num < more / added:
                break
            blocks[-2:] = [(low, high, total + more, num + added)]
    return [(low, high, total / num) for low, high, total, num in blocks]


def cross_validated(
    fit: Fit, rows: Sequence[Probabilities], gold: Sequence[int]
) -> list[list[float]]:
    """Return each row's probabilities by a map that was fitted without the row's fold."""
    result: list[list[float]] = [[]] * len(rows)
    for held_out in _folds(len(rows)):
        hidden = set(held_out)
        others = [index for index in range(len(rows)) if index not in hidden]
        fitted = fit([rows[index] for index in others], [gold[index] for index in others])
        for index in held_out:
            result[index] = fitted(rows[index])
    return result


def _folds(num_rows: int) -> Iterator[list[int]]:
    """Yield five parts of the rows, in a random order that is always the same."""
    order = list(range(num_rows))
    Random(0).shuffle(order)  # noqa: S311
    for first in range(min(NUM_FOLDS, num_rows)):
        yield order[first::NUM_FOLDS]
