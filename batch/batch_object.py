"""OpenAI's Batch object with Tidemill's extra fields, for API responses and reports."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel

from .file.throughput import Rates
from .file.unknown_parameters import UnknownParameter
from .fleet import WaitingReason, WorkerRate
from .forecast import batch_seconds_left, estimate_gpu_seconds
from .model import Batch
from .progress_counts import Progress
from .states import Status

MAX_LISTED_ERRORS = 100


class ErrorObject(BaseModel):
    """One error of a batch or of a line; `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class ErrorsObject(BaseModel):
    """The first errors of a batch; `tidemill.num_errors` has their total number."""

    object: Literal["list"] = "list"
    data: list[ErrorObject]


class RequestCounts(BaseModel):
    """Number of lines in the file, and how many of them have a row: a success or a failure."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    """Prompt tokens that were in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Reasoning tokens, for models that report them separately."""

    reasoning_tokens: int = 0


class UsageObject(BaseModel):
    """Token usage of the durable rows."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class WebhookAttempt(BaseModel):
    """One attempt to call a webhook: the HTTP status of the response, or the error."""

    at: int
    status_code: int | None
    error: str | None


class WebhookObject(BaseModel):
    """Webhook delivery status; only the host of the URL is shown."""

    host: str
    status: Literal["pending", "delivered", "failed"]
    attempts: list[WebhookAttempt]


class WaitingObject(BaseModel):
    """Reason why no worker is started for open lines, since when, and what to do.

    The code is `crash_loop`, `start_refused`, `stopped` (by an operator), `no_capacity`,
    `not_started`, `gpu_hours_used_up` (the tenant's daily limit) or `budget_used_up` (everyone's).
    """

    code: str
    message: str
    since: int


class UnknownParameterObject(BaseModel):
    """An unknown parameter in the bodies of `count` lines, and the most similar known one."""

    name: str
    url: str
    count: int
    first_line: int
    suggestion: str | None


class ThresholdObject(BaseModel):
    """A threshold learnt from gold rows: how many there are, and how many the first model keeps.

    `accuracy` is that of the accepted rows; `checked_accuracy` that of rows which did not choose
    the threshold. Both are null without accepted rows: then all rows are escalated.
    """

    gold_rows: int
    accepted_gold_rows: int
    accuracy: float | None
    checked_accuracy: float | None


class TidemillObject(BaseModel):
    """Tidemill's fields of a Batch, in addition to OpenAI's.

    A batch with a lower `priority` runs first. `seconds` is the running time so far, or until the
    end. Rates are those of the last minute over the running shards. Once the batch has ended they
    are the mean from `first_row_at`, when the first row began to run, to `last_row_at`, when the
    last one ended; token rates count generated tokens or prompt tokens. `eta_at` (Unix seconds) is
    the estimated end. `audio_seconds` is the length of the transcribed audio.
    `reused_rows` are completed rows that an earlier batch computed: `usage` excludes their
    tokens. `truncated_rows` are completed rows whose answer reached its token limit.
    `escalated_rows` are left to the model `escalate`, or answered by it: the rows whose confidence
    is lower than `escalate_below`, which may be learnt as `learnt_threshold` describes.
    `escalation_failed_rows` of them have the first model's answer, because the second one failed
    or did not reach them; their bodies have an `escalation_error`.
    `is_table` says whether the input is a table. Once the output table exists, `table_url` is its
    URL, `table_file_id` its file ID, and `questions` are the distributions of the answers in it.
    `unknown_parameters` lists the most frequent ones, which are ignored.
    `cost` is in the currency of the deployment's price per GPU-hour, and null without a price.
    Estimates cover the whole batch; they are null while unknown and after the end.
    `labels_spans` says that the model, a token classifier, labels spans of texts.
    `has_worker` says whether a worker is running lines of the batch. An erasure starts at
    `erasing_at`, and all bytes of the batch are deleted at `erased_at`.
    A retry runs requests of the batch `retry_of`, whose newest retry is `retried_by`.
    Its rows then replace those of that batch, whose counts and file IDs change; `merge` says
    whether that is `done` or `failed`.
    """

    priority: int
    seconds: int
    first_row_at: float | None
    last_row_at: float | None
    rows_per_second: float
    tokens_per_second: float
    input_tokens_per_second: float
    audio_seconds_per_second: float
    audio_seconds: float
    reused_rows: int
    truncated_rows: int
    escalate: str | None
    escalated_rows: int
    escalation_failed_rows: int
    escalate_below: float | None
    learnt_threshold: ThresholdObject | None
    unknown_parameters: list[UnknownParameterObject]
    is_table: bool
    table_file_id: str | None
    table_url: str | None
    questions: list[dict[str, Any]]
    eta_at: int | None
    gpu_seconds: float
    cost: float | None
    estimated_gpu_seconds: float | None
    estimated_cost: float | None
    model_revision: str | None
    engine_version: str | None
    labels_spans: bool
    num_errors: int
    output_delivery: str | None
    error_delivery: str | None
    webhook: WebhookObject | None
    has_worker: bool
    waiting: WaitingObject | None
    erasing_at: int | None
    erased_at: int | None
    retry_of: str | None
    retried_by: str | None
    merge: Literal["done", "failed"] | None


class BatchObject(BaseModel):
    """OpenAI's Batch: every key is present, and null until its value is known."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: ErrorsObject | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: UsageObject
    metadata: dict[str, str] | None
    tidemill: TidemillObject


def batch_object(
    batch: Batch,
    progress: Progress,
    *,
    now: float,
    price_per_gpu_hour: float | None = None,
    max_errors: int = MAX_LISTED_ERRORS,
    has_worker: bool = False,
    waiting: WaitingReason | None = None,
    rate: WorkerRate | None = None,
) -> BatchObject:
    """Return the Batch object; `progress` comes from the shards until the final sums are known.

    `rate` is the rate measured by workers of its model. `now` does not matter for an ended batch.
    The cost is null without a price.
    """
    if batch.erasing_at is not None:
        batch = batch.tombstone
    done = batch.final or progress
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=_errors(batch, max_errors),
        input_file_id=batch.input_file_id,
        completion_window=batch.options.completion_window,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        expires_at=batch.expires_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at,
        cancelled_at=batch.cancelled_at,
        request_counts=RequestCounts(
            total=batch.num_rows, completed=done.completed, failed=done.failed
        ),
        usage=UsageObject(
            input_tokens=done.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=done.cached_tokens),
            output_tokens=done.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=done.reasoning_tokens),
            total_tokens=done.prompt_tokens + done.completion_tokens,
        ),
        metadata=batch.options.metadata or None,
        tidemill=_tidemill_object(
            batch,
            done,
            now,
            price_per_gpu_hour,
            waiting,
            rate=rate,
            has_worker=has_worker,
            max_errors=max_errors,
        ),
    )


def cost_of(gpu_seconds: float | None, price_per_gpu_hour: float | None) -> float | None:
    """Return the cost of GPU time, in the currency of the price."""
    if price_per_gpu_hour is None or gpu_seconds is None:
        return None
    return round(gpu_seconds / 3600 * price_per_gpu_hour, 6)


def is_over_cost(batch: Batch, progress: Progress, price_per_gpu_hour: float | None) -> bool:
    """Say whether the GPU time so far has reached the batch's cost limit."""
    cost, most = cost_of(progress.gpu_seconds, price_per_gpu_hour), batch.options.max_cost
    return cost is not None and most is not None and cost >= most


def eta_of(batch: Batch, progress: Progress, now: float) -> int | None:
    """Return when all rows will be finished at the present rate; None while unknown."""
    if batch.status is not Status.IN_PROGRESS or batch.in_progress_at is None:
        return None
    left = batch_seconds_left(batch, progress, now - batch.in_progress_at)
    return None if left is None else math.ceil(now + left)


def _tidemill_object(
    batch: Batch,
    done: Progress,
    now: float,
    price_per_gpu_hour: float | None,
    waiting: WaitingReason | None,
    *,
    rate: WorkerRate | None,
    has_worker: bool,
    max_errors: int,
) -> TidemillObject:
    is_running = batch.status is Status.IN_PROGRESS
    estimated = estimate_gpu_seconds(batch, done, rate or WorkerRate()) if is_running else None
    until = batch.end_at or now
    seconds = max(0, int(until - (batch.in_progress_at or batch.created_at)))
    return TidemillObject(
        priority=batch.priority,
        seconds=seconds,
        first_row_at=done.first_row_at or None,
        last_row_at=done.last_row_at or None,
        **(done.rates if is_running else _mean_rates(batch, done, seconds))._asdict(),
        audio_seconds=round(done.audio_seconds, 3),
        reused_rows=done.reused,
        truncated_rows=done.truncated,
        **_escalation_fields(batch, done),
        unknown_parameters=[_unknown(each) for each in batch.unknown_parameters[:max_errors]],
        is_table=batch.is_table,
        table_file_id=batch.table_file_id,
        table_url=_table_url(batch),
        questions=[] if batch.questions is None else json.loads(batch.questions),
        eta_at=eta_of(batch, done, now),
        gpu_seconds=round(done.gpu_seconds, 3),
        cost=cost_of(done.gpu_seconds, price_per_gpu_hour),
        estimated_gpu_seconds=None if estimated is None else round(estimated, 3),
        estimated_cost=cost_of(estimated, price_per_gpu_hour),
        model_revision=batch.engine.model_revision,
        engine_version=batch.engine.engine_version,
        labels_spans=batch.engine.labels_spans,
        num_errors=max(batch.num_errors, len(batch.errors)),
        output_delivery=batch.output_delivery,
        error_delivery=batch.error_delivery,
        webhook=_webhook(batch),
        has_worker=is_running and has_worker,
        waiting=None if waiting is None else WaitingObject(**asdict(waiting)),
        erasing_at=batch.erasing_at,
        erased_at=batch.erased_at,
        retry_of=None if batch.retry is None else batch.retry.of,
        retried_by=batch.retried_by,
        merge=batch.merge,
    )


def _escalation_fields(batch: Batch, done: Progress) -> dict[str, Any]:
    """Return the fields about a second model; before its threshold is learnt, it has no rows."""
    may_learn = batch.awaits_threshold and not batch.is_terminal
    found, learnt = batch.escalation, None
    if found is not None and found.learnt is not None:
        learnt = ThresholdObject(
            gold_rows=found.learnt.num_rows,
            accepted_gold_rows=found.learnt.num_accepted,
            accuracy=found.learnt.accuracy,
            checked_accuracy=found.learnt.checked_accuracy,
        )
    return {
        "escalate": None if found is None else found.name,
        "escalated_rows": 0 if may_learn else done.escalated,
        "escalation_failed_rows": done.escalation_failed,
        "escalate_below": None if found is None else found.threshold,
        "learnt_threshold": learnt,
    }


def _mean_rates(batch: Batch, done: Progress, seconds: int) -> Rates:
    """Return the mean rates of an ended batch; zeros while it runs, or if it never ran.

    Reused rows do not count, because they took no time. Without the times of its rows, the rates
    are those over the whole run.
    """
    if not batch.is_terminal or batch.in_progress_at is None:
        return Rates()
    span = max(0.001, done.row_seconds) if done.first_row_at else max(1, seconds)
    num_run = done.num_rows - done.reused
    counts = (num_run, done.completion_tokens, done.prompt_tokens, done.audio_seconds)
    return Rates(*(round(count / span, 3) for count in counts))


def _table_url(batch: Batch) -> str | None:
    if batch.table_file_id is None:
        return None
    return f"s3://{batch.source.bucket}/{batch.outputs.table_key}"


def _unknown(unknown: UnknownParameter) -> UnknownParameterObject:
    return UnknownParameterObject(**asdict(unknown))


def _webhook(batch: Batch) -> WebhookObject | None:
    if batch.webhook_delivery is None:
        return None
    attempts = [
        WebhookAttempt(at=each.at, status_code=each.status_code, error=each.error)
        for each in batch.webhook_log
    ]
    return WebhookObject(
        host=batch.webhook_host or "", status=batch.webhook_delivery, attempts=attempts
    )


def _errors(batch: Batch, max_errors: int) -> ErrorsObject | None:
    if not batch.errors:
        return None
    data = [
        ErrorObject(code=error.code, message=error.message, param=error.param, line=error.line)
        for error in batch.errors[:max_errors]
    ]
    return ErrorsObject(data=data)
