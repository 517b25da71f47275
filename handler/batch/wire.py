"""A batch as OpenAI's Batch object and as the report beside its output."""

from __future__ import annotations

from typing import Any

from handler.batch.model import Batch, Progress

MAX_LISTED_ERRORS = 100


def to_wire(batch: Batch, progress: Progress) -> dict[str, Any]:
    """Return the Batch object, every key present and null until it is known."""
    done = batch.final or progress
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.options.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": batch.num_rows,
            "completed": done.completed,
            "failed": done.failed,
        },
        "usage": {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": {"cached_tokens": done.cached_tokens},
            "output_tokens": done.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": done.prompt_tokens + done.completion_tokens,
        },
        "metadata": batch.options.metadata or None,
    }


def to_report(
    batch: Batch, progress: Progress, *, now: int, price_per_gpu_hour: float | None
) -> dict[str, Any]:
    """Return what `batch.json` holds: the Batch object and, under `tidemill`, what it cost.

    `now` is when the batch ended. The price is null unless a rate (per GPU-hour) is set.
    """
    seconds = now - (batch.in_progress_at or batch.created_at)
    return to_wire(batch, progress) | {
        "tidemill": {
            "seconds": seconds,
            "gpu_seconds": round(progress.gpu_seconds, 3),
            "price": price_of(progress, price_per_gpu_hour),
            "model_revision": batch.engine.model_revision,
            "engine_version": batch.engine.engine_version,
            "num_errors": batch.num_errors,
            "output_delivery": batch.output_delivery,
            "error_delivery": batch.error_delivery,
        }
    }


def price_of(progress: Progress, price_per_gpu_hour: float | None) -> float | None:
    """Return the price of the GPU time so far, in the currency of the rate."""
    if price_per_gpu_hour is None:
        return None
    return round(progress.gpu_seconds / 3600 * price_per_gpu_hour, 6)


def _errors(batch: Batch) -> dict[str, Any] | None:
    if not batch.errors:
        return None
    data = [
        {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
        for error in batch.errors
    ]
    return {"object": "list", "data": data}
