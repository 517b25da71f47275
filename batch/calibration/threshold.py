"""Threshold of confidence with which answers reach a target accuracy, found on gold rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..escalation import Threshold

_NUM_FOLDS = 5
_MIN_ACCEPTED = 10
"""Number of gold rows that a threshold must accept, because fewer are right by chance."""


class GoldRow(NamedTuple):
    """A decided row: the least confidence of its answers, and how many gold answers are right."""

    confidence: float
    num_right: int
    num_gold: int


def find_threshold(rows: Sequence[GoldRow], target: float) -> Threshold:
    """Return the threshold that accepts most of the rows at the target accuracy."""
    value = _lowest(rows, target)
    accepted = _accepted(rows, value)
    checked: list[GoldRow] = []
    for fold in range(_NUM_FOLDS):
        others = [row for place, row in enumerate(rows) if place % _NUM_FOLDS != fold]
        checked += _accepted(rows[fold::_NUM_FOLDS], _lowest(others, target))
    return Threshold(value, len(rows), len(accepted), _accuracy(accepted), _accuracy(checked))


def _lowest(rows: Sequence[GoldRow], target: float) -> float | None:
    found, num_right, num_gold = None, 0, 0
    ordered = sorted(rows, key=lambda row: -row.confidence)
    for place, row in enumerate(ordered, 1):
        num_right, num_gold = num_right + row.num_right, num_gold + row.num_gold
        is_last = place == len(ordered) or ordered[place].confidence < row.confidence
        if place >= _MIN_ACCEPTED and is_last and num_right >= target * num_gold:
            found = row.confidence
    return found


def _accepted(rows: Sequence[GoldRow], value: float | None) -> list[GoldRow]:
    return [row for row in rows if value is not None and row.confidence >= value]


def _accuracy(rows: Sequence[GoldRow]) -> float | None:
    num_gold = sum(row.num_gold for row in rows)
    return sum(row.num_right for row in rows) / num_gold if num_gold else None
