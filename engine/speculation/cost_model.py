"""Cost model: seconds of a run as a sum over its steps and tokens, fitted to what runs took."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..storage.disk_cache import CacheEntry


class Work(NamedTuple):
    """Work of an engine: steps, tokens prefilled and decoded, and those that decodes attend to."""

    steps: float = 0.0
    prefilled: float = 0.0
    decoded: float = 0.0
    attended: float = 0.0

    def minus(self, other: Work) -> Work:
        """Return what is more here than in the other."""
        return Work(*(ours - theirs for ours, theirs in zip(self, other, strict=True)))


_PRIOR_WEIGHT: Final = 0.003
_IN_PREFILLED: Final = Work(steps=100.0, prefilled=1.0, decoded=1.0, attended=1e-3)
"""Usual costs in prefilled tokens. A step reads the weights once: operations a second over bytes a
second, 240 on an H100, 50 on two cores; an attended token is some thousandth of the weights."""

_FULL_SECONDS: Final = 10.0
_FORGOTTEN: Final = 0.2
"""Weight that runs lose to one of `_FULL_SECONDS` after them; a shorter one weighs less."""

_NUM_KINDS: Final = len(Work._fields)
_PREFILLED: Final = np.array(Work(prefilled=1.0))
_SUBSETS: Final = [
    [*kinds] for size in range(1, _NUM_KINDS + 1) for kinds in combinations(range(_NUM_KINDS), size)
]


@dataclass(slots=True)
class CostModel:
    """Costs of each kind of work by least squares, none below 0; and seconds before the first step.

    Where nothing tells them apart, they cost as usual: a decoded token as much as a prefilled one,
    as what else it takes is that of its step, and of the tokens that it attends to.
    """

    products: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((_NUM_KINDS, _NUM_KINDS))
    )
    times: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_NUM_KINDS))
    fixed_seconds: float = 0.0

    def add(self, work: Work, seconds: float) -> None:
        """Learn from work that took so long; a long interval weighs as much as many short ones."""
        counts = np.array(work, np.float64)
        self.products += np.outer(counts, counts) / seconds
        self.times += counts

    def scale(self, factor: float) -> None:
        """Change the weight of what was learned so far."""
        self.products *= factor
        self.times *= factor

    def costs(self) -> Work | None:
        """Return the seconds of one of each kind; None while nothing is known."""
        if not self.times.any():
            return None
        products = self.products.copy()
        for kind, usual in enumerate(_IN_PREFILLED):
            differs = -usual * _PREFILLED
            differs[kind] += 1
            products += _PRIOR_WEIGHT * products[kind, kind] * np.outer(differs, differs)
        return Work(*_nonnegative_least_squares(products, self.times).tolist())

    def seconds(self, work: Work) -> float | None:
        """Return the seconds that work takes; None while nothing is known."""
        costs = self.costs()
        return None if costs is None else float(np.dot(costs, work))

    @classmethod
    def recall(cls, model: str, device: str) -> Self | None:
        """Return what runs of a model came to on a device of this name."""
        try:
            kept = json.loads(_entry(model, device).load() or b"null")
            products, times = np.array(kept["products"]), np.array(kept["times"])
            found = cls(products, times, float(kept["fixed_seconds"]))
        except (ValueError, TypeError, KeyError):
            return None
        return found if products.shape == (_NUM_KINDS,) * 2 else None

    def save(self, model: str, device: str, seconds: float) -> None:
        """Keep what a run of so many seconds taught, beside what runs before it did."""
        weight = min(1.0, seconds / _FULL_SECONDS)
        self.scale(weight / seconds)
        if (before := self.recall(model, device)) is not None:
            before.scale(1 - _FORGOTTEN * weight)
            self.products += before.products
            self.times += before.times
        kept = {
            "products": self.products.tolist(),
            "times": self.times.tolist(),
            "fixed_seconds": self.fixed_seconds,
        }
        _entry(model, device).save(json.dumps(kept).encode())


def _nonnegative_least_squares(
    products: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the costs that fit best of those that are not below 0.

    There are few kinds: the best solution is that of a subset of them, whose own is not below 0.
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
