"""New batches that retry the requests of an ended batch that did not succeed.

The API only counts failures and records the batch: intake selects and edits its lines.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final
from uuid import uuid4

from tidemill.batch.batch_request import window_seconds
from tidemill.batch.creation_order import creation_ns
from tidemill.batch.escalation import Escalation
from tidemill.batch.model import Batch, Options
from tidemill.batch.object_keys import batch_id_of_request, outputs_of_request
from tidemill.batch.result_kinds import ERRORS
from tidemill.batch.retry import (
    FailureCounts,
    NothingToRetry,
    check_no_retry,
    check_retryable,
    class_of_failure,
)
from tidemill.batch.retry_request import RetryParams
from tidemill.batch.states import Status

from ..aws.bucket import read_range
from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..deployment import Deployment
from ..errors import NotThere
from ..inputs.row_sources import row_sources
from ..lifecycle.announce import announce
from ..lifecycle.erasure import BatchErased
from .new_batch import requested_escalation, webhook_of

# With another value of these, the first model decides again.
_OF_MODEL: Final = frozenset({"model", "decide_by"})
# Failures of a larger error file are counted by intake: an API Lambda has half a minute.
_MAX_COUNTED_BYTES: Final = 4 * 2**20


def create_retry(
    deployment: Deployment, old: Batch, params: RetryParams, key: str | None, now: int
) -> Operation[Batch]:
    """Return the retry of a batch, or the existing one of the same idempotency key.

    Raises InvalidOption, NotRetryable, LimitReached, BatchErased, and NotThere if the input or the
    rows of the batch were deleted.
    """
    batch_id = batch_id_of_request(old.tenant, key or uuid4().hex)
    made = (yield from deployment.table.get_batch(batch_id)) if key else None
    if made is None:
        counts = yield from _check(deployment, old, params)
        yield from deployment.limits.admit_batch(old.tenant, now)
        made = yield from deployment.table.create_batch(
            (yield from _new_batch(deployment, old, params, batch_id, now, counts=counts))
        )
    if made.erasing_at is not None:
        raise BatchErased(made)
    params.check_same(made)
    if made.id != old.retried_by:
        yield from deployment.table.change_batch(old.id, old.status, retried_by=made.id)
    yield from announce(deployment, made)
    if made.status is Status.VALIDATING:
        yield from deployment.control.send(advance_message(made.id), group=old.tenant)
    return made


def count_failures(deployment: Deployment, batch: Batch) -> Operation[FailureCounts | None]:
    """Return the failures of an ended batch by class; None if they are too many to be read here.

    Raises NotThere if the error file was deleted.
    """
    done = batch.final
    counts = FailureCounts()
    if done is not None:
        counts.escalation = done.escalation_failed
        counts.not_run = max(0, batch.num_rows - done.num_rows)
    for source in (yield from row_sources(deployment, batch, (ERRORS,))):
        if source.num_bytes > _MAX_COUNTED_BYTES:
            return None
        for row in (yield from read_range(source, 0, source.num_bytes)).splitlines():
            counts.add(class_of_failure(row))
    return counts


def _check(
    deployment: Deployment, old: Batch, params: RetryParams
) -> Operation[FailureCounts | None]:
    """Return the failures of a batch, as far as known; raises an error for one without any."""
    check_retryable(old)
    other = (yield from deployment.table.get_batch(old.retried_by)) if old.retried_by else None
    check_no_retry(other)
    if (yield from deployment.bucket.head(old.input.key, old.input.version_id)) is None:
        raise NotThere(f"The input of batch {old.id} was deleted: submit it again.")
    counts = yield from count_failures(deployment, old)
    if counts is None or not counts.total:  # a batch that was cancelled before intake counted it
        return counts
    retry = params.retry
    num_selected = counts.num_selected(include_invalid=retry.include_invalid)
    if not num_selected and not (retry.include_invalid and retry.prompt):
        raise NothingToRetry(counts.reason)
    return counts


def _new_batch(
    deployment: Deployment,
    old: Batch,
    params: RetryParams,
    batch_id: str,
    now: int,
    *,
    counts: FailureCounts | None,
) -> Operation[Batch]:
    options = params.options
    escalation = _escalation_of(deployment, options, old.escalation)
    if _is_of_second_model(old, params, counts):
        escalation = None  # the batch is the second model's
    expires_at = now + window_seconds(options.completion_window)
    return Batch(
        id=batch_id,
        tenant=old.tenant,
        source=old.input,
        input_file_id=old.input_file_id,
        options=options,
        outputs=outputs_of_request(old.tenant, batch_id),
        created_at=now,
        created_ns=creation_ns(),
        expires_at=expires_at,
        expires=deployment.settings.forget_at(expires_at),
        endpoint=old.endpoint,
        escalation=escalation,
        retry=params.retry,
        **(yield from webhook_of(deployment, old.tenant, options, "webhook_url", now)),
    )


def _is_of_second_model(old: Batch, params: RetryParams, counts: FailureCounts | None) -> bool:
    """Return whether a retry is only of rows that the second model of a cascade has failed.

    Their threshold and way to decide must be the same, or the first model decides, too, as it does
    for another model.
    """
    known, options, retry = old.escalation, params.options, params.retry
    if known is None or known.is_waiting or counts is None:
        return False
    if retry.body is not None and not _OF_MODEL.isdisjoint(json.loads(retry.body)):
        return False
    requested = (options.escalate, options.escalate_below, options.escalate_by)
    if requested != (known.name, known.threshold or 1.0, known.by):
        return False
    num_selected = counts.num_selected(include_invalid=retry.include_invalid)
    is_alone = 0 < counts.escalation == num_selected
    return is_alone and not (retry.include_invalid and retry.prompt)


def _escalation_of(
    deployment: Deployment, options: Options, known: Escalation | None
) -> Escalation | None:
    """Return the second model of a retry, with the learnt threshold unless another is given."""
    found = requested_escalation(deployment, options)
    if found is None or known is None or known.learnt is None or found.model != known.model:
        return found
    # Without a threshold all rows are escalated, of which `parse_retry` makes 1.0.
    is_same = found.below == (known.threshold or 1.0)
    return replace(found, below=None, learnt=known.learnt) if is_same else found
