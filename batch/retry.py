"""Retry of a batch: the lines that it selects and edits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pydantic_core import from_json, to_json

from .errors import HandlerError, InvalidOption
from .escalation import Escalation
from .file.decided_row import has_escalation_error
from .file.escalated_line import escalated_line
from .file.lines import BOM, LineError, RawLine, parse_line
from .file.row_order import rows_of_lines
from .file.rows import is_success
from .model import Batch, Retry
from .progress_counts import Progress
from .result_kinds import ERRORS, KINDS, ResultKind
from .states import Status

_INVALID: Final = frozenset({400, 413, 422})
"""Statuses of rows whose request would fail again unchanged."""

FailureClass = Literal["retryable", "invalid", "malformed"]


class NotRetryable(HandlerError):
    """A batch whose requests cannot be retried."""

    code = "not_retryable"


class NothingToRetry(InvalidOption):
    """A retry that selects no request."""

    code = "nothing_to_retry"

    def __init__(self, message: str) -> None:
        super().__init__(message, param=None)


def check_retryable(batch: Batch) -> None:
    """Raise NotRetryable for a batch that has not ended, or failed as a whole.

    Raises NothingToRetry for one whose requests have all succeeded.
    """
    if not batch.is_terminal:
        raise NotRetryable(f"Batch {batch.id} is {batch.status}: retry it when it has ended.")
    if batch.status is Status.FAILED and batch.output_file_id is batch.error_file_id is None:
        raise NotRetryable(
            f"Batch {batch.id} failed as a whole: correct its file and submit it again."
        )
    final = batch.final or Progress()
    if 0 < batch.num_rows <= final.completed and not final.escalation_failed:
        raise NothingToRetry(f"All requests of batch {batch.id} succeeded.")


def check_no_retry(other: Batch | None) -> None:
    """Raise NotRetryable while another retry of the same batch has not ended."""
    if other is not None and not other.is_terminal:
        raise NotRetryable(
            f"Batch {other.id} is retrying these requests: wait for it, or cancel it."
        )


def merge_patched(value: object, patch: object) -> Any:
    """Return a JSON value with a merge patch (RFC 7396): null removes a field."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(value) if isinstance(value, Mapping) else {}
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patched(merged.get(name), change)
    return merged


def class_of_failure(row: bytes) -> FailureClass:
    """Return whether a retry may change a failed row, or why not."""
    fields = from_json(row)
    response, error = fields.get("response"), fields.get("error")
    if isinstance(response, dict):
        return "invalid" if response.get("status_code") in _INVALID else "retryable"
    is_malformed = isinstance(error, dict) and error.get("code") == "invalid_json_line"
    return "malformed" if is_malformed else "retryable"


@dataclass(slots=True)
class FailureCounts:
    """Failed rows by class; `not_run` counts lines without a row.

    `escalation` counts the first model's rows in a cascade whose second model has failed.
    """

    retryable: int = 0
    invalid: int = 0
    malformed: int = 0
    not_run: int = 0
    escalation: int = 0

    def add(self, kind: FailureClass) -> None:
        """Count a failed row."""
        setattr(self, kind, getattr(self, kind) + 1)

    @property
    def total(self) -> int:
        """Number of lines that did not succeed."""
        return self.retryable + self.invalid + self.malformed + self.not_run + self.escalation

    def num_selected(self, *, include_invalid: bool) -> int:
        """Return the number of requests of a retry."""
        own = self.retryable + self.not_run + self.escalation
        return own + (self.invalid if include_invalid else 0)

    @property
    def reason(self) -> str:
        """Return why nothing can be retried."""
        fixed = self.invalid + self.malformed
        words = f"{fixed:,} of {self.total:,} failed for reasons that a retry does not change."
        return words + (" To retry them, set `include_invalid`." if self.invalid else "")


def have_only_requests(batch: Batch) -> bool:
    """Say whether all lines of a batch are requests: others were refused by intake."""
    return batch.options.on_invalid_line == "fail"


@dataclass(slots=True)
class RetryLines:
    """The lines of a retry, from those of the retried `batch` and its rows.

    With a `second` model, they are only those that it has failed, as it gets them.
    """

    retry: Retry
    batch: Batch
    second: Escalation | None = None
    counts: FailureCounts = field(default_factory=FailureCounts)

    @property
    def kinds(self) -> tuple[ResultKind, ...]:
        """The results that `select` needs."""
        is_short = self.is_whole and not (self.batch.final or Progress()).escalation_failed
        return (ERRORS,) if is_short else KINDS

    @property
    def is_whole(self) -> bool:
        """Say whether every line of the batch has a row."""
        final, num_rows = self.batch.final, self.batch.num_rows
        return final is not None and final.num_rows >= num_rows > 0

    def select(self, lines: Iterable[RawLine], files: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
        """Yield the selected lines, edited, and an empty piece for each other line.

        `files` are the error file and the output, each in line order. If the retried batch
        `is_whole`, each line without a row in them has succeeded: the output is needed only for
        the rows that the second model of a cascade has failed.
        """
        patch = None if self.retry.body is None else from_json(self.retry.body)
        for raw, row in rows_of_lines(lines, [files], are_requests=have_only_requests(self.batch)):
            is_wanted = self._is_wanted(row)
            yield self._line(raw, patch) if is_wanted else b""

    def _is_wanted(self, row: bytes | None) -> bool:
        if row is None:
            self.counts.not_run += not self.is_whole
            return not self.is_whole
        if is_success(row):
            is_escalated = has_escalation_error(row)
            self.counts.escalation += is_escalated
            return is_escalated
        kind = class_of_failure(row)
        self.counts.add(kind)
        may_be_edited = self.retry.include_invalid and (
            kind == "invalid" or self.retry.prompt is not None
        )
        return kind == "retryable" or may_be_edited

    def _line(self, raw: RawLine, patch: object) -> bytes:
        if raw.overlong is not None:
            return b""
        data = raw.data if patch is None else _patched(raw, patch)
        if self.second is not None:
            second = self.second
            data = escalated_line(RawLine(raw.number, data), second.by, second.name).data
        return data + b"\n"


def _patched(raw: RawLine, patch: object) -> bytes:
    try:
        line = parse_line(raw)
    except LineError:
        return raw.data
    fields = from_json(raw.data.removeprefix(BOM))
    fields["body"] = merge_patched(line.body, patch)
    return to_json(fields, inf_nan_mode="constants")


def merged_counts(
    old: Batch, completed: int, failed: int, escalation_failed: int = 0
) -> dict[str, Any]:
    """Return the changed counts of a retried batch whose results have these numbers of rows."""
    counts = {"completed": completed, "failed": failed, "escalation_failed": escalation_failed}
    final = replace(old.final or Progress(), **counts)
    return {"final": final, "num_rows": max(completed + failed, old.num_rows)}
