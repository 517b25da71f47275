"""Accuracy of decisions: by threshold, and compared with their confidence."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from tidemill.protocol.decisions.questions import winner_of

from .probability_maps import Probabilities

THRESHOLDS: Final = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
TARGETS: Final = (0.8, 0.9, 0.95, 0.98, 0.99)
_NUM_BINS: Final = 10
_Z: Final = 1.96  # of a two-sided interval of 95 %


@dataclass(frozen=True, slots=True)
class Accepted:
    """The gold rows whose confidence is at least `threshold`, and their accuracy.

    `share` is that of all rows with this confidence, with and without a gold answer; `at_least` is
    the lower end of the accuracy's 95 % interval (Wilson).
    """

    threshold: float
    num_rows: int
    share: float
    accuracy: float
    at_least: float


@dataclass(frozen=True, slots=True)
class Bin:
    """The gold rows whose confidence is in one tenth of its range."""

    num_rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of decisions on rows with gold answers.

    `calibration_error` is the expected calibration error: the mean distance of confidence and
    accuracy over ten bins of confidence, weighted by their rows.
    """

    num_rows: int
    accuracy: float
    calibration_error: float
    bins: tuple[Bin, ...]
    by_threshold: tuple[Accepted, ...]
    by_target: tuple[tuple[float, Accepted], ...]
    """For each target accuracy that some threshold reaches: the one that accepts most rows."""

    @classmethod
    def measure(
        cls,
        rows: Sequence[Probabilities],
        gold: Sequence[int],
        everything: Sequence[Probabilities] | None = None,
    ) -> Self:
        """Return the accuracy of the most likely options.

        `everything` has the rows from which shares are taken, by default the gold rows.
        """
        winners = list(map(winner_of, rows))
        pairs = [
            (row[best], best == answer)
            for row, best, answer in zip(rows, winners, gold, strict=True)
        ]
        bins = _bins(pairs)
        num_rows = len(pairs)
        error = math.fsum(each.num_rows * abs(each.confidence - each.accuracy) for each in bins)
        shares = _Shares(rows if everything is None else everything)
        by_confidence = _by_confidence(pairs, shares)
        return cls(
            num_rows,
            sum(hit for _, hit in pairs) / num_rows,
            error / num_rows,
            tuple(bins),
            tuple(_accepted(pairs, threshold, shares) for threshold in THRESHOLDS),
            tuple(
                (target, best)
                for target in TARGETS
                if (best := _reaching(by_confidence, target)) is not None
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the accuracy as a value of JSON."""
        return {
            **asdict(self),
            "by_target": [{"target": target, **asdict(each)} for target, each in self.by_target],
        }


def _bins(pairs: Sequence[tuple[float, bool]]) -> list[Bin]:
    parts: list[list[tuple[float, bool]]] = [[] for _ in range(_NUM_BINS)]
    for confidence, hit in pairs:
        parts[min(_NUM_BINS - 1, int(confidence * _NUM_BINS))].append((confidence, hit))
    return [
        Bin(
            len(part),
            math.fsum(confidence for confidence, _ in part) / len(part),
            sum(hit for _, hit in part) / len(part),
        )
        for part in parts
        if part
    ]


class _Shares:
    """Shares of rows by their least confidence."""

    def __init__(self, rows: Sequence[Probabilities]) -> None:
        self._confidences = sorted(max(row) for row in rows)

    def at(self, threshold: float) -> float:
        """Return the share of the rows whose confidence is at least a threshold."""
        total = len(self._confidences)
        return (total - bisect_left(self._confidences, threshold)) / max(1, total)


def _accepted(pairs: Sequence[tuple[float, bool]], threshold: float, shares: _Shares) -> Accepted:
    hits = [hit for confidence, hit in pairs if confidence >= threshold]
    return _counted(threshold, len(hits), sum(hits), shares)


def _counted(threshold: float, num_rows: int, num_hits: int, shares: _Shares) -> Accepted:
    accuracy = num_hits / num_rows if num_rows else 0.0
    interval = _wilson(num_hits, num_rows)
    return Accepted(threshold, num_rows, shares.at(threshold), accuracy, interval)


def _by_confidence(pairs: Sequence[tuple[float, bool]], shares: _Shares) -> list[Accepted]:
    """Return the rows that are accepted at each confidence that occurs, the highest first."""
    found: list[Accepted] = []
    hits = 0
    ordered = sorted(pairs, reverse=True)
    for count, (confidence, hit) in enumerate(ordered, 1):
        hits += hit
        if count == len(ordered) or ordered[count][0] < confidence:
            found.append(_counted(confidence, count, hits, shares))
    return found


def _reaching(candidates: Sequence[Accepted], target: float) -> Accepted | None:
    reached = [each for each in candidates if each.accuracy >= target]
    return max(reached, key=lambda each: each.num_rows, default=None)


def _wilson(num_hits: int, num_rows: int) -> float:
    if not num_rows:
        return 0.0
    share, square = num_hits / num_rows, _Z * _Z
    center = share + square / (2 * num_rows)
    spread = _Z * math.sqrt(share * (1 - share) / num_rows + square / (4 * num_rows**2))
    return max(0.0, (center - spread) / (1 + square / num_rows))
