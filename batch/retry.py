"""Retry of a batch: the lines that it selects and edits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pydantic_core import from_json, to_json

from .errors import HandlerError, InvalidOption
from .file.lines import BOM, LineError, RawLine, parse_line
from .file.row_order import rows_of_lines
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
    if batch.num_rows and batch.final is not None and batch.final.completed >= batch.num_rows:
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
    """Failed rows by class; `not_run` counts lines without a row."""

    retryable: int = 0
    invalid: int = 0
    malformed: int = 0
    not_run: int = 0

    def add(self, kind: FailureClass) -> None:
        """Count a failed row."""
        setattr(self, kind, getattr(self, kind) + 1)

    @property
    def total(self) -> int:
        """Number of lines that did not succeed."""
        return self.retryable + self.invalid + self.malformed + self.not_run

    def num_selected(self, *, include_invalid: bool) -> int:
        """Return the number of requests of a retry."""
        return self.retryable + self.not_run + (self.invalid if include_invalid else 0)

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
    """The lines of a retry, from those of the retried `batch` and its rows."""

    retry: Retry
    batch: Batch
    counts: FailureCounts = field(default_factory=FailureCounts)

    @property
    def kinds(self) -> tuple[ResultKind, ...]:
        """The results that `select` needs."""
        return (ERRORS,) if self.is_whole else KINDS

    @property
    def is_whole(self) -> bool:
        """Say whether every line of the batch has a row."""
        final, num_rows = self.batch.final, self.batch.num_rows
        return final is not None and final.num_rows >= num_rows > 0

    def select(self, lines: Iterable[RawLine], files: Sequence[Iterable[bytes]]) -> Iterator[bytes]:
        """Yield the selected lines, edited, and an empty piece for each other line.

        `files` are the error file and the output, each in line order. If the retried batch
        `is_whole`, each line without a row in them has succeeded: the output is not needed.
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
            return False
        kind = class_of_failure(row)
        self.counts.add(kind)
        may_be_edited = self.retry.include_invalid and (
            kind == "invalid" or self.retry.prompt is not None
        )
        return kind == "retryable" or may_be_edited

    def _line(self, raw: RawLine, patch: object) -> bytes:
        if raw.overlong is not None:
            return b""
        if patch is None:
            return raw.data + b"\n"
        try:
            line = parse_line(raw)
        except LineError:
            return raw.data + b"\n"
        fields = from_json(raw.data.removeprefix(BOM))
        fields["body"] = merge_patched(line.body, patch)
        return to_json(fields, inf_nan_mode="constants") + b"\n"


def merged_counts(old: Batch, completed: int, failed: int) -> dict[str, Any]:
    """Return the changed counts of a retried batch whose results have these numbers of rows."""
    final = replace(old.final or Progress(), completed=completed, failed=failed)
    return {"final": final, "num_rows": max(completed + failed, old.num_rows)}


def is_success(row: bytes) -> bool:
    """Return whether a printed row is that of a successful request."""
    # Quotes inside strings are escaped, so a custom ID cannot contain this.
    return b',"response":{"status_code":200,' in row
