"""A batch as OpenAI's Batch object, with what we know beyond it: in answers and in the report."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from .file.throughput import Rates
from .file.unknown_parameters import UnknownParameter
from .fleet import WaitingReason, WorkerRate
from .forecast import batch_seconds_left, estimate_gpu_seconds
from .model import Batch, Progress
from .states import Status

MAX_LISTED_ERRORS = 100


class ErrorObject(BaseModel):
    """One reason why a batch or a line of it was refused; `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class ErrorsObject(BaseModel):
    """The first of a batch's errors; `tidemill.num_errors` tells how many there are."""

    object: Literal["list"] = "list"
    data: list[ErrorObject]


class RequestCounts(BaseModel):
    """Lines of the file, and how many of them have a row: a success or another."""

    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    """Tokens of prompts whose prefix was in the cache."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Tokens of reasoning, where a model tells them apart."""

    reasoning_tokens: int = 0


class UsageObject(BaseModel):
    """Tokens of the rows that are durable."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class WebhookAttempt(BaseModel):
    """One try to tell a webhook: the status that it answered, or why there is none."""

    at: int
    status_code: int | None
    error: str | None


class WebhookObject(BaseModel):
    """Webhook delivery status; only the host of its url is shown."""

    host: str
    status: Literal["pending", "delivered", "failed"]
    attempts: list[WebhookAttempt]


class WaitingObject(BaseModel):
    """Reason why no worker is started for open lines, since when, and what helps.

    The code is `crash_loop`, `start_refused`, `stopped` (by a person), `no_capacity`,
    `not_started`, `gpu_hours_used_up` (the tenant's of this day) or `budget_used_up` (everybody's).
    """

    code: str
    message: str
    since: int


class UnknownParameterObject(BaseModel):
    """A name in `count` lines' bodies that is no parameter of their url, and the one meant."""

    name: str
    url: str
    count: int
    first_line: int
    suggestion: str | None


class TidemillObject(BaseModel):
    """Extra fields of a Batch, beyond OpenAI's.

    `seconds` are those since the batch runs, up to its end. Rates are of the last minute and of
    shards that a worker runs, and the mean over `seconds` once the batch has ended; those of tokens
    are of generated ones or of prompts. `eta_at` (Unix seconds) is the expected end.
    `audio_seconds` is how much was listened to.
    `reused_rows` are completed ones that an earlier batch has computed: `usage` has none of their
    tokens. `truncated_rows` are completed ones whose answer was cut off at its token limit.
    `table_url` is where the table of an input's rows is that was one, and `table_file_id`
    its file. `unknown_parameters` are the most frequent ones, without which lines run.
    `cost` is in the currency of the deployment's price for a GPU-hour, null without one.
    What is estimated is of the whole batch, null where nobody can know and once it ends.
    `has_worker` says whether a worker runs lines of it now. A batch that is erased is so from
    `erasing_at` on, and all its bytes are gone at `erased_at`.
    """

    seconds: int
    rows_per_second: float
    tokens_per_second: float
    input_tokens_per_second: float
    audio_seconds_per_second: float
    audio_seconds: float
    reused_rows: int
    truncated_rows: int
    unknown_parameters: list[UnknownParameterObject]
    table_file_id: str | None
    table_url: str | None
    eta_at: int | None
    gpu_seconds: float
    cost: float | None
    estimated_gpu_seconds: float | None
    estimated_cost: float | None
    model_revision: str | None
    engine_version: str | None
    num_errors: int
    output_delivery: str | None
    error_delivery: str | None
    webhook: WebhookObject | None
    has_worker: bool
    waiting: WaitingObject | None
    erasing_at: int | None
    erased_at: int | None


class BatchObject(BaseModel):
    """OpenAI's Batch: every key is present, and null until it is known."""

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
    """Return the Batch object; `progress` is what the shards say, until the final sums are known.

    `rate` is what workers of its model have measured. Of an ended batch `now` counts for nothing.
    The cost is null unless a price is given.
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
    """Say whether the GPU time so far has come to all that the batch may cost."""
    cost, most = cost_of(progress.gpu_seconds, price_per_gpu_hour), batch.options.max_cost
    return cost is not None and most is not None and cost >= most


def eta_of(batch: Batch, progress: Progress, now: float) -> int | None:
    """Return when all rows would be there at the present rate; None while nobody can know."""
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
    until = _end_of(batch) or now
    seconds = max(0, int(until - (batch.in_progress_at or batch.created_at)))
    return TidemillObject(
        seconds=seconds,
        **(done.rates if is_running else _mean_rates(batch, done, seconds))._asdict(),
        audio_seconds=round(done.audio_seconds, 3),
        reused_rows=done.reused,
        truncated_rows=done.truncated,
        unknown_parameters=[_unknown(each) for each in batch.unknown_parameters[:max_errors]],
        table_file_id=batch.table_file_id,
        table_url=_table_url(batch),
        eta_at=eta_of(batch, done, now),
        gpu_seconds=round(done.gpu_seconds, 3),
        cost=cost_of(done.gpu_seconds, price_per_gpu_hour),
        estimated_gpu_seconds=None if estimated is None else round(estimated, 3),
        estimated_cost=cost_of(estimated, price_per_gpu_hour),
        model_revision=batch.engine.model_revision,
        engine_version=batch.engine.engine_version,
        num_errors=max(batch.num_errors, len(batch.errors)),
        output_delivery=batch.output_delivery,
        error_delivery=batch.error_delivery,
        webhook=_webhook(batch),
        has_worker=is_running and has_worker,
        waiting=None if waiting is None else WaitingObject(**asdict(waiting)),
        erasing_at=batch.erasing_at,
        erased_at=batch.erased_at,
    )


def _mean_rates(batch: Batch, done: Progress, seconds: int) -> Rates:
    """Return the means of an ended batch; zeros for one that has not ended, or has never run."""
    if not batch.is_terminal or batch.in_progress_at is None:
        return Rates()
    counts = (done.num_rows, done.completion_tokens, done.prompt_tokens, done.audio_seconds)
    return Rates(*(round(count / max(1, seconds), 3) for count in counts))


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


def _end_of(batch: Batch) -> int | None:
    if not batch.is_terminal:
        return None
    at: int | None = getattr(batch, f"{batch.status}_at")
    return batch.ended_at or at


def _errors(batch: Batch, max_errors: int) -> ErrorsObject | None:
    if not batch.errors:
        return None
    data = [
        ErrorObject(code=error.code, message=error.message, param=error.param, line=error.line)
        for error in batch.errors[:max_errors]
    ]
    return ErrorsObject(data=data)
