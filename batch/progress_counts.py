"""Domain value: the progress of a shard or a batch in counts, which add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Final

from .file.expected_tokens import ExpectedTokens
from .file.throughput import Rates

ROW_TIMES = ("first_row_at", "last_row_at")
"""Fields of Progress that are times, which are not added up."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Rows, usage and time as absolute counts, for one shard or summed over several.

    Only durable rows count, and expected tokens are intake's estimate for them. `reused` rows are
    among the completed ones and cost no tokens or time. The rates are recent ones, of generated
    tokens unless named otherwise; a sum adds them up.
    `truncated` rows are completed ones whose answer reached its token limit. `escalated` rows are
    left to a second model, or answered by it; its GPU time is part of `gpu_seconds`.
    `escalation_failed` rows are escalated ones that keep the first model's answer because the
    second model failed.
    The first row that a model answered began at `first_row_at` and the last one ended at
    `last_row_at` (Unix seconds, zero without one); a sum contains the earliest and the latest.
    """

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    gpu_seconds: float = 0.0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    audio_seconds: float = 0.0
    input_tokens_per_second: float = 0.0
    audio_seconds_per_second: float = 0.0
    reasoning_tokens: int = 0
    expected_input_tokens: int = 0
    expected_output_tokens: int = 0
    reused: int = 0
    truncated: int = 0
    escalated: int = 0
    escalated_gpu_seconds: float = 0.0
    first_row_at: float = 0.0
    last_row_at: float = 0.0
    escalation_failed: int = 0

    def __add__(self, other: Progress) -> Progress:
        """Return the sum, field by field."""
        return sum_of((self, other))

    def since(self, earlier: Progress) -> Progress:
        """Return the difference to an earlier progress, field by field and never negative.

        It has no rates and no times.
        """
        both = zip(_counts_of(self), _counts_of(earlier), strict=True)
        gained = Progress(*(max(type(now)(0), now - then) for now, then in both)).without_rates
        return replace(gained, first_row_at=0.0, last_row_at=0.0)

    @property
    def rates(self) -> Rates:
        """The rates alone, rounded to three places."""
        return Rates(*(round(getattr(self, name), 3) for name in Rates._fields))

    @property
    def without_rates(self) -> Progress:
        """The same counts without rates, for work that no worker runs."""
        return replace(self, **Rates()._asdict())

    @property
    def expected(self) -> ExpectedTokens:
        """Tokens that intake expects for these rows."""
        return ExpectedTokens(self.expected_input_tokens, self.expected_output_tokens)

    @property
    def num_rows(self) -> int:
        """Number of durable rows, successes and failures."""
        return self.completed + self.failed

    @property
    def row_seconds(self) -> float:
        """Seconds from the beginning of the first row to the end of the last one."""
        return max(0.0, self.last_row_at - self.first_row_at) if self.first_row_at else 0.0


NO_PROGRESS = Progress()
_COUNTS: Final = [each.name for each in fields(Progress)]
_counts_of: Callable[[Progress], tuple[Any, ...]] = attrgetter(*_COUNTS)


def sum_of(progresses: Iterable[Progress]) -> Progress:
    """Return the sum, field by field, of any number of values; zeros for none."""
    columns = dict(zip(_COUNTS, zip(*map(_counts_of, progresses), strict=True), strict=False))
    if not columns:
        return NO_PROGRESS
    sums = {name: sum(column) for name, column in columns.items()}
    first, last = (columns[name] for name in ROW_TIMES)
    times = min((at for at in first if at), default=0.0), max(last)
    return Progress(**sums | dict(zip(ROW_TIMES, times, strict=True)))
