"""Request of a retry, as the API takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field
from pydantic_core import from_json, to_json

from .batch_body import BatchOptions
from .batch_request import (
    ECHO_OF_TABLE,
    MAX_METADATA_PAIRS,
    check_idempotency_key,
    explicit,
    options_of_request,
)
from .errors import InvalidOption, KeyReused
from .model import Batch, Options, Retry

RETRY_OF: Final = "retry_of"
"""Metadata key of a retry, for the retried batch's ID."""

_INHERITED: Final = ("completion_window", "webhook_url", "max_cost", "priority", "echo_fields")
_MAX_EDIT_BYTES: Final = 2**16


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

    def check_same(self, existing: Batch) -> None:
        """Raise KeyReused if an existing batch of this key is another retry, or none."""
        if (existing.retry, explicit(existing.options)) != (self.retry, explicit(self.options)):
            raise KeyReused(
                "This `idempotency_key` was already used for another batch: use a new key.",
                param="idempotency_key",
            )


def parse_retry(batch: Batch, request: RetryRequest, earlier: Retry | None = None) -> RetryParams:
    """Return a retry of a batch and the options of the new batch; raises InvalidOption.

    The edits are added to those of an `earlier` retry.
    """
    old, given = batch.options, request.fields()
    fields = {name: getattr(old, name) for name in _INHERITED} | _escalation_of(batch, given)
    fields |= {name: value for name, value in given.items() if value is not None}
    fields["metadata"] = {**old.metadata, **(request.metadata or {})}
    if len(fields["metadata"]) < MAX_METADATA_PAIRS or RETRY_OF in fields["metadata"]:
        fields["metadata"][RETRY_OF] = batch.id
    options = options_of_request(fields)
    check_idempotency_key(request.idempotency_key)
    is_table = batch.conversion is not None and batch.conversion.recipe is not None
    if options.echo_fields and is_table:
        raise InvalidOption(ECHO_OF_TABLE, param="echo_fields")
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


def _escalation_of(batch: Batch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the second model of a retried batch, with its threshold unless another is given."""
    found = batch.escalation
    if given.get("target_accuracy") is not None:
        words = "`target_accuracy` is not supported in a retry: pass `escalate_below`."
        raise InvalidOption(words, param="target_accuracy")
    if found is None:
        return {}
    if found.is_waiting and given.get("escalate_below") is None:
        words = "The batch ended before its threshold was learnt: pass `escalate_below`."
        raise InvalidOption(words, param="escalate_below")
    # Without a threshold that reaches the target, all rows are escalated.
    below = found.threshold or 1.0
    return {"escalate": found.name, "escalate_below": below, "escalate_by": found.by}


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
