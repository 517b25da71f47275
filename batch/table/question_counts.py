"""Question counts: the distribution of a question's answers over a table, with its diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidemill.protocol.decisions.questions import mean_level, winner_of

from .questions import Probabilities, TableQuestion

LOW_MASS: Final = 0.1
"""Share of the whole vocabulary below which the labels hardly describe an answer."""


@dataclass(slots=True)
class QuestionCounts:
    """Counts of the answers to one question; memory does not depend on the number of rows.

    `num_low` rows put less than `LOW_MASS` on the labels; of `num_in_orders` rows that were read in
    several orders of the options, `num_changed` had different winners.
    """

    question: TableQuestion
    winners: list[int] = field(default_factory=list)
    entropy: float = 0.0
    score: float = 0.0
    num_diagnosed: int = 0
    label_mass: float = 0.0
    num_low: int = 0
    num_in_orders: int = 0
    num_changed: int = 0

    def __post_init__(self) -> None:
        self.winners = [0] * len(self.question.options)

    def add(self, probabilities: Probabilities, diagnostics: Mapping[str, Any] | None) -> None:
        """Count an answer; another server's rows may have no diagnostics."""
        self.winners[winner_of(probabilities)] += 1
        self.entropy -= sum(share * math.log2(share) for share in probabilities if share > 0)
        self.score += mean_level(probabilities)
        if diagnostics is None or "label_mass" not in diagnostics:  # of a generated answer
            return
        self.num_diagnosed += 1
        self.label_mass += diagnostics["label_mass"]
        self.num_low += diagnostics["label_mass"] < LOW_MASS
        if (agreement := diagnostics.get("agreement")) is not None:
            self.num_in_orders += 1
            self.num_changed += agreement < 1

    def summary(self) -> dict[str, Any]:
        """Return the counts and means as JSON; a mean is None without rows."""
        rows, question = sum(self.winners), self.question
        found: dict[str, Any] = {
            "name": question.name,
            "type": question.kind,
            "rows": rows,
            "values": {
                option.text: count
                for option, count in zip(question.options, self.winners, strict=True)
            },
            "mean_entropy": _mean(self.entropy, rows),
            "mean_label_mass": _mean(self.label_mass, self.num_diagnosed),
            "low_label_mass": _mean(self.num_low, self.num_diagnosed),
        }
        if question.kind == "score":
            found["mean_score"] = _mean(self.score, rows)
        if self.num_in_orders:
            found["changed_winner"] = _mean(self.num_changed, self.num_in_orders)
        return found


def wording_fault(summary: Mapping[str, Any]) -> str | None:
    """Return advice on a question whose labels are unlikely answers for most rows."""
    share = summary["low_label_mass"]
    if share is None or share <= 1 / 2:
        return None
    return (
        f"question `{summary['name']}`: {share:.0%} of rows put less than {LOW_MASS:.0%} on its "
        "labels, so its probabilities say little: reword the question"
    )


def _mean(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None
