"""Escalation: the second model of a batch or run, and the rows that it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EscalateBy = Literal["decision", "chat"]
"""How a second model decides: as the first one does, or by a generated answer."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The lowest confidence from which the answers of gold rows reach a target accuracy.

    `value` is None if no threshold that accepts ten rows reaches it. `num_accepted` of `num_rows`
    gold rows have at least this confidence, and `accuracy` is that of their answers.
    `checked_accuracy` is measured on rows that did not choose the threshold: each fifth is checked
    with the threshold of the others. An accuracy is None without accepted rows.
    """

    value: float | None = None
    num_rows: int = 0
    num_accepted: int = 0
    accuracy: float | None = None
    checked_accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class Escalation:
    """The second model of a batch: it answers the rows whose confidence is lower than `below`.

    `name` is its name in requests, `model` the model whose workers run them. With a `target`
    accuracy instead, `learnt` is the threshold that gold rows give once the first model has
    answered all rows. `by` is how it decides.
    """

    name: str
    model: str
    below: float | None = None
    target: float | None = None
    learnt: Threshold | None = None
    by: EscalateBy = "decision"

    @property
    def is_waiting(self) -> bool:
        """Return whether the threshold is not known yet."""
        return self.below is None and self.learnt is None

    @property
    def threshold(self) -> float | None:
        """Return the confidence below which rows are escalated; None if all are, or may be."""
        return self.below if self.learnt is None else self.learnt.value
