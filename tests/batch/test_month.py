"""Use of a deployment in a month."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.batch.test_states import NEW
from tidemill.batch.escalation import Escalation
from tidemill.batch.month import (
    ModelUse,
    is_month,
    merged,
    month_of,
    month_words,
    shifted,
    total_of,
    uses_of,
)
from tidemill.batch.progress_counts import Progress

DONE = Progress(7, 3, 70, 20, 21, gpu_seconds=5400.0, escalated_gpu_seconds=1800.0)


def priced(**prices: float) -> Callable[[str | None], float | None]:
    """Return the price of a model's GPU-hour by its name."""
    return lambda model: prices.get(model or "")


def test_gpu_time_and_cost_belong_to_the_model_that_used_them() -> None:
    """The rows belong to the first model; a model without a price costs nothing."""
    batch = replace(NEW, model="small", escalation=Escalation("big", "large", 0.5))
    uses = uses_of(batch, DONE, priced(small=2.0, large=8.0))
    assert uses == [
        ModelUse("large", gpu_seconds=1800.0, cost=4.0),
        ModelUse("small", 1, 7, 3, 70, 21, 3600.0, 2.0),
    ]
    assert total_of([*uses, *uses]) == ModelUse("", 2, 14, 6, 140, 42, 10_800.0, 12.0)
    assert [use.cost for use in uses_of(batch, DONE, priced(small=2.0))] == [0.0, 2.0]
    assert [use.batches for use in merged([*uses, *uses])] == [0, 2]


def test_months_follow_one_another() -> None:
    """They are those of UTC; other texts are not months."""
    assert month_of(1_796_083_199) == "2026-11"
    assert month_of(1_796_083_200) == "2026-12"
    assert (shifted("2026-12", 1), shifted("2026-01", -1)) == ("2027-01", "2025-12")
    assert month_words("2026-11") == "November 2026"
    texts = ("2026-11", "2026-13", "2026-1", "2026-11\n")
    assert [is_month(text) for text in texts] == [True, False, False, False]
