"""Retry of a batch: the parameters of a request, and the lines that it selects and edits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field
from pydantic_core import from_json, to_json

from .batch_request import (
    MAX_METADATA_PAIRS,
    BatchOptions,
    check_idempotency_key,
    options_of_request,
)
from .errors import HandlerError, InvalidOption
from .file.lines import BOM, LineError, RawLine, parse_line
from .file.row_order import rows_of_lines
from .model import Batch, Options, Retry
from .states import Status

RETRY_OF: Final = "retry_of"
"""Metadata key of a retry, for the retried batch's ID."""

_INHERITED: Final = ("completion_window", "webhook_url", "max_cost", "escalate", "escalate_below")
_MAX_EDIT_BYTES: Final = 2**16
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


class RetryRequest(BatchOptions):
    """A retry of a batch; a null parameter counts as missing, or is that of the retried batch."""

    include_invalid: Annotated[
        bool | None,
        Field(description="Also retry requests that were refused (status 400, 413 or 422)."),
    ] = None
    body: Annotated[
        dict[str, Any] | None,
        Field(description="A merge patch of the bodies, such as max_tokens; null removes a field."),
    ] = None
    prompt: Annotated[
        str | None, Field(description="A prompt that replaces the prompt of a table's recipe.")
    ] = None


class RetryParams(NamedTuple):
    """A retry, and the options of its batch."""

    retry: Retry
    options: Options


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


def parse_retry(batch: Batch, request: RetryRequest, earlier: Retry | None = None) -> RetryParams:
    """Return a retry of a batch and the options of the new batch; raises InvalidOption.

    The edits are added to those of an `earlier` retry.
    """
    old, given = batch.options, request.fields()
    fields = {name: getattr(old, name) for name in _INHERITED}
    fields |= {name: value for name, value in given.items() if value is not None}
    fields["metadata"] = {**old.metadata, **(request.metadata or {})}
    if len(fields["metadata"]) < MAX_METADATA_PAIRS or RETRY_OF in fields["metadata"]:
        fields["metadata"][RETRY_OF] = batch.id
    options = options_of_request(fields)
    check_idempotency_key(request.idempotency_key)
    is_table = batch.conversion is not None and batch.conversion.recipe is not None
    if request.prompt is not None and not is_table:
        raise InvalidOption(
            "`prompt` is supported only for tables: edit `body` instead.", param="prompt"
        )
    earlier = earlier or Retry(batch.id)
    patch = _both_patches(from_json(earlier.body or "{}"), request.body or {})
    retry = Retry(
        batch.id,
        include_invalid=bool(request.include_invalid),
        body=_text("body", to_json(patch, inf_nan_mode="constants")) if patch else None,
        prompt=earlier.prompt
        if request.prompt is None
        else _text("prompt", _encoded(request.prompt)),
    )
    return RetryParams(retry, options)


def _encoded(prompt: str) -> bytes:
    if not prompt.strip():
        raise InvalidOption("`prompt` is empty.", param="prompt")
    try:
        return prompt.encode()
    except UnicodeEncodeError as exc:
        raise InvalidOption("`prompt` contains an unpaired surrogate.", param="prompt") from exc


def _text(name: str, data: bytes) -> str:
    if len(data) > _MAX_EDIT_BYTES:
        raise InvalidOption(
            f"`{name}` has {len(data):,} bytes, and the limit is {_MAX_EDIT_BYTES:,}.", param=name
        )
    return data.decode()


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


def _both_patches(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return one patch with the effect of two."""
    both = dict(first)
    for name, change in second.items():
        before = both.get(name)
        if isinstance(before, Mapping) and isinstance(change, Mapping):
            both[name] = _both_patches(before, change)
        else:
            both[name] = change
    return both


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


def is_success(row: bytes) -> bool:
    """Return whether a printed row is that of a successful request."""
    # Quotes inside strings are escaped, so a custom ID cannot contain this.
    return b',"response":{"status_code":200,' in row
