"""Cost model: seconds of a run as a sum over its steps and tokens, fitted to measured runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..storage.disk_cache import CacheEntry


class Work(NamedTuple):
    """Work of an engine: steps, tokens prefilled and decoded, and tokens that decodes attend to."""

    steps: float = 0.0
    prefilled: float = 0.0
    decoded: float = 0.0
    attended: float = 0.0

    def minus(self, other: Work) -> Work:
        """Return the difference of the two."""
        return Work(*(ours - theirs for ours, theirs in zip(self, other, strict=True)))


_PRIOR_WEIGHT: Final = 0.003
_IN_PREFILLED: Final = Work(steps=100.0, prefilled=1.0, decoded=1.0, attended=1e-3)
"""Usual costs in prefilled tokens. A step reads the weights once: FLOPS divided by bytes per second
is 240 on an H100, and 50 on two cores; an attended token is about a thousandth of the weights."""

_FULL_SECONDS: Final = 10.0
_FORGOTTEN: Final = 0.2
"""Weight that runs lose to a later one of `_FULL_SECONDS`; a shorter one weighs less."""

_NUM_KINDS: Final = len(Work._fields)
_PREFILLED: Final = np.array(Work(prefilled=1.0))
_SUBSETS: Final = [
    [*kinds] for size in range(1, _NUM_KINDS + 1) for kinds in combinations(range(_NUM_KINDS), size)
]


@dataclass(slots=True)
class CostModel:
    """Costs of each kind of work by least squares, at least 0; and seconds before the first step.

    If the data does not distinguish two kinds, usual costs apply: a decoded token costs as much as
    a prefilled one, since the rest of its cost belongs to its step and to the attended tokens.
    """

    products: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((_NUM_KINDS, _NUM_KINDS))
    )
    times: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_KINDS))
    fixed_seconds: float = 0.0

    def add(self, work: Work, seconds: float) -> None:
        """Add work and its duration; a long interval weighs as much as many short ones."""
        counts = np.array(work, np.float64)
        self.products += np.outer(counts, counts) / seconds
        self.times += counts

    def scale(self, factor: float) -> None:
        """Change the weight of all data so far."""
        self.products *= factor
        self.times *= factor

    def costs(self) -> Work | None:
        """Return the seconds of one unit of each kind; None without data."""
        if not self.times.any():
            return None
        products = self.products.copy()
        for kind, usual in enumerate(_IN_PREFILLED):
            differs = -usual * _PREFILLED
            differs[kind] += 1
            products += _PRIOR_WEIGHT * products[kind, kind] * np.outer(differs, differs)
        return Work(*_nonnegative_least_squares(products, self.times).tolist())

    def seconds(self, work: Work) -> float | None:
        """Return the predicted seconds of work; None without data."""
        costs = self.costs()
        return None if costs is None else float(np.dot(costs, work))

    @classmethod
    def recall(cls, model: str, device: str) -> Self | None:
        """Return the saved model of runs on a device with this name."""
        try:
            saved = json.loads(_entry(model, device).load() or b"null")
            products, times = np.array(saved["products"]), np.array(saved["times"])
            recalled = cls(products, times, float(saved["fixed_seconds"]))
        except (ValueError, TypeError, KeyError):
            return None
        return recalled if products.shape == (_NUM_KINDS,) * 2 else None

    def save(self, model: str, device: str, seconds: float) -> None:
        """Save the data of a run of this duration, combined with that of earlier runs."""
        weight = min(1.0, seconds / _FULL_SECONDS)
        self.scale(weight / seconds)
        if (before := self.recall(model, device)) is not None:
            before.scale(1 - _FORGOTTEN * weight)
            self.products += before.products
            self.times += before.times
        data = {
            "products": self.products.tolist(),
            "times": self.times.tolist(),
            "fixed_seconds": self.fixed_seconds,
        }
        _entry(model, device).save(json.dumps(data).encode())


def _nonnegative_least_squares(
    products: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the best-fitting costs that are not below 0.

    There are few kinds: the solution is the best one among subsets whose own solution is not
    below 0.
    """
    sizes = np.sqrt(np.maximum(products.diagonal(), np.finfo(np.float64).tiny))
    products, times = products / np.outer(sizes, sizes), times / sizes
    best, best_error = np.zeros(len(times)), 0.0
    for kinds in _SUBSETS:
        costs = np.zeros(len(times))
        costs[kinds], *_ = np.linalg.lstsq(products[np.ix_(kinds, kinds)], times[kinds], rcond=None)
        error = float(costs @ products @ costs - 2 * times @ costs)
        if costs.min() >= 0 and error < best_error:
            best, best_error = costs, error
    return best / sizes


def _entry(model: str, device: str) -> CacheEntry:
    return CacheEntry.from_inputs("cost-model", model, device)
