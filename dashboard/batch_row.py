"""A batch as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.batch.batch_object import BatchObject
from tidemill.batch.file.throughput import Rates
from tidemill.batch.states import TERMINAL, Status

from .failures import first_sentence
from .tabs import WITH_ERRORS, tab_of
from .trial import TRIAL_ENDING

# These produce numbers, not tokens.
_WITHOUT_TOKENS = {
    *("/v1/embeddings", "/v2/embed", "/v1/score", "/v1/rerank", "/v1/generative_scoring"),
    *("/v1/decisions", "/v1/systemone", "/v1/classify", "/v1/moderations", "/pooling"),
}
_CANCELLABLE = {Status.VALIDATING, Status.IN_PROGRESS}


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch for display: the API's object, a name for it, and derived values."""

    wire: BatchObject
    name: str
    now: float
    first_error: str = ""

    @property
    def is_with_errors(self) -> bool:
        """True for a completed batch with failed rows."""
        return tab_of(self.wire.status, self.wire.request_counts.failed) == WITH_ERRORS

    @property
    def reason(self) -> str:
        """First sentence of why it was refused or of its first failed row; may be empty."""
        errors = self.wire.errors.data if self.wire.errors else []
        if errors and self.wire.status is not Status.COMPLETED:
            line = f"Line {errors[0].line}: " if errors[0].line else ""
            return line + first_sentence(errors[0].message)
        return first_sentence(self.first_error) if self.is_with_errors else ""

    def is_found(self, tab: str, name: str) -> bool:
        """Return whether it is of a tab and its name or ID contains `name`; empty ones match."""
        words = name.casefold()
        is_named = words in self.name.casefold() or words in self.wire.id
        return is_named and tab in ("", tab_of(self.wire.status, self.wire.request_counts.failed))

    @property
    def has_ended(self) -> bool:
        """True once nothing changes any more."""
        return self.wire.status in TERMINAL

    @property
    def is_cancellable(self) -> bool:
        """True while it can be cancelled."""
        return self.wire.status in _CANCELLABLE

    @property
    def is_trial(self) -> bool:
        """True for a file of the first rows of another one."""
        return self.name.endswith(TRIAL_ENDING)

    @property
    def lacks_table(self) -> bool:
        """True for a table with rows that ended before its output table was written."""
        is_missing = self.wire.tidemill.is_table and not self.wire.tidemill.table_file_id
        return is_missing and self.has_ended and self.num_done > 0

    @property
    def num_done(self) -> int:
        """Number of finished rows, successful or failed."""
        return self.wire.request_counts.completed + self.wire.request_counts.failed

    @property
    def percent(self) -> int:
        """Percentage of finished rows; 100 only when all are."""
        total = self.wire.request_counts.total
        return self.num_done * 100 // total if total else 0

    @property
    def writes_tokens(self) -> bool:
        """True for a model that generates tokens."""
        wire = self.wire
        return bool(wire.usage.output_tokens) or wire.endpoint not in _WITHOUT_TOKENS

    @property
    def flow(self) -> str:
        """Rate of tokens written, tokens read or audio, the first that applies."""
        beyond = self.wire.tidemill
        return Rates(*(getattr(beyond, name) for name in Rates._fields)).main_rate

    @property
    def worked_from(self) -> float:
        """Time at which the first row began or, before that, the batch."""
        wire = self.wire
        return wire.tidemill.first_row_at or wire.in_progress_at or wire.created_at

    @property
    def worked_until(self) -> float | None:
        """Time at which the last row ended, or could have; None while more may come."""
        wire = self.wire
        if self.has_ended and wire.tidemill.last_row_at:
            return wire.tidemill.last_row_at
        ends = (wire.finalizing_at, wire.completed_at, wire.cancelled_at, wire.expired_at)
        return next((at for at in ends if at), None)

    @property
    def left_seconds(self) -> float | None:
        """Seconds left at the present rate."""
        eta_at = self.wire.tidemill.eta_at
        return None if eta_at is None else max(0.0, eta_at - self.now)
