"""Use of a deployment in a month (UTC), by model: rows, tokens, GPU time and cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Final

from .batch_object import cost_of
from .model import Batch
from .progress_counts import Progress

_MONTH: Final = re.compile(r"2\d{3}-(0[1-9]|1[0-2])", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelUse:
    """Sums over batches for one model; a cost of zero means that there is no price."""

    model: str
    batches: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    gpu_seconds: float = 0.0
    cost: float = 0.0

    def __add__(self, other: ModelUse) -> ModelUse:
        """Return the sum, with the first one's model."""
        names = [field.name for field in fields(self) if field.name != "model"]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


def uses_of(
    batch: Batch, done: Progress, price_of: Callable[[str | None], float | None]
) -> list[ModelUse]:
    """Return the use of a batch: its rows under its model, and the GPU time under each model.

    `price_of` returns the price of a model's GPU-hour.
    """
    second = batch.escalation.model if batch.escalation is not None else None
    later = done.escalated_gpu_seconds if second is not None else 0.0
    first = max(0.0, done.gpu_seconds - later)
    uses = [
        ModelUse(
            batch.model or "",
            1,
            done.completed,
            done.failed,
            done.prompt_tokens,
            done.completion_tokens,
            round(first, 3),
            cost_of(first, price_of(batch.model)) or 0.0,
        )
    ]
    if second is not None and later:
        cost = cost_of(later, price_of(second)) or 0.0
        uses.append(ModelUse(second, gpu_seconds=round(later, 3), cost=cost))
    return merged(uses)


def merged(uses: Iterable[ModelUse]) -> list[ModelUse]:
    """Return one sum per model, in order of the names."""
    found: dict[str, ModelUse] = {}
    for use in uses:
        found[use.model] = found[use.model] + use if use.model in found else use
    return [found[model] for model in sorted(found)]


def total_of(uses: Sequence[ModelUse]) -> ModelUse:
    """Return the sum over all models."""
    return sum(uses, start=ModelUse(""))


def is_month(name: str) -> bool:
    """Say whether a text is a month, such as `2026-11`."""
    return _MONTH.fullmatch(name) is not None


def month_of(at: float) -> str:
    """Return the month of a time (Unix seconds)."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m}"


def shifted(month: str, by: int) -> str:
    """Return the month that follows or, for a negative number, precedes a month."""
    year, number = map(int, month.split("-"))
    year, index = divmod(12 * year + number - 1 + by, 12)
    return f"{year:04}-{index + 1:02}"


def month_words(month: str) -> str:
    """Return the name of a month: `November 2026`."""
    return f"{datetime.strptime(month, '%Y-%m').replace(tzinfo=UTC):%B %Y}"
