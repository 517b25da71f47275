"""Metrics for CloudWatch, as log lines of JSON in its embedded metric format (EMF).

Powertools has an emitter, and importing it costs nothing if its logger is imported. But it buffers
metrics until an invocation ends, and prints them unflushed and in two writes; a worker has no such
end and may be killed, and the reaper has eight threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from aws_lambda_powertools import Logger
from pydantic_core import to_json

from tidemill.batch.progress_counts import Progress

NAMESPACE: Final = "Tidemill"


class Metric(StrEnum):
    """All metrics; docs/reference/metrics.md explains them."""

    PROMPT_TOKENS = "PromptTokens"
    CACHED_TOKENS = "CachedTokens"
    COMPLETION_TOKENS = "CompletionTokens"
    AUDIO_SECONDS = "AudioSeconds"
    TOKENS_PER_SECOND = "TokensPerSecond"
    ROWS_COMPLETED = "RowsCompleted"
    ROWS_FAILED = "RowsFailed"
    ROWS_REUSED = "RowsReused"
    ROWS_TRUNCATED = "RowsTruncated"
    QUEUE_WAIT_SECONDS = "QueueWaitSeconds"
    KV_CACHE_USE = "KvCacheUse"
    LEASES_LOST = "LeasesLost"
    ENGINE_DEATHS = "EngineDeaths"
    GPU_SECONDS = "GpuSeconds"
    BATCHES_COMPLETED = "BatchesCompleted"
    BATCHES_FAILED = "BatchesFailed"
    COLD_START_IMAGE_SECONDS = "ColdStartImageSeconds"
    COLD_START_WEIGHTS_SECONDS = "ColdStartWeightsSeconds"
    COLD_START_READY_SECONDS = "ColdStartReadySeconds"
    COLD_START_ROW_SECONDS = "ColdStartRowSeconds"
    SHARDS_GIVEN_UP = "ShardsGivenUp"
    MESSAGES_FAILED = "MessagesFailed"
    WORKERS = "Workers"
    WORKERS_WANTED = "WorkersWanted"
    FLEET_BRAKED = "FleetBraked"
    BUDGET_SPENT = "BudgetSpent"


Figures = Mapping[Metric, float]

# Units of the metrics that are not counts.
_UNITS: Final[Mapping[Metric, str]] = {
    Metric.TOKENS_PER_SECOND: "Count/Second",
    Metric.QUEUE_WAIT_SECONDS: "Seconds",
    Metric.KV_CACHE_USE: "Percent",
    Metric.GPU_SECONDS: "Seconds",
    Metric.AUDIO_SECONDS: "Seconds",
    Metric.COLD_START_IMAGE_SECONDS: "Seconds",
    Metric.COLD_START_WEIGHTS_SECONDS: "Seconds",
    Metric.COLD_START_READY_SECONDS: "Seconds",
    Metric.COLD_START_ROW_SECONDS: "Seconds",
}


def emit(
    figures: Figures, service: str | None = None, /, *, model: str | None, **labels: str | int
) -> None:
    """Emit metrics of this process, and of a model if one is known.

    `service` names the process; without it the environment does.

    `labels` are in the line, where queries find them, but are not dimensions: a metric for each
    batch would cost more than the batch. The line is an event of the log like any other, except
    that the logger's level does not apply. A closed standard output is not an error.
    """
    # The stacks set this variable for Lambdas and workers; a worker elsewhere has none.
    named = service or os.environ.get("POWERTOOLS_SERVICE_NAME", "worker")
    dimensions = {"service": named}
    if model is not None:
        dimensions["model"] = model
    metrics = [{"Name": metric, "Unit": _UNITS.get(metric, "Count")} for metric in figures]
    directive = {"Namespace": NAMESPACE, "Dimensions": [list(dimensions)], "Metrics": metrics}
    now = datetime.now(UTC)
    event = {
        "level": "INFO",
        "message": "figures",
        "timestamp": f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03}+0000",
    }
    about = {"Timestamp": int(now.timestamp() * 1000), "CloudWatchMetrics": [directive]}
    line = to_json({**event, **dimensions, **figures, **labels, "_aws": about}).decode()
    with suppress(OSError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def figures_of(done: Progress) -> dict[Metric, float]:
    """Return the metrics of durable rows: `done` is the progress that the table has recorded.

    A shard's progress in the table is set under its fencing token, and the writer emits the
    difference to the previous value: rows that run again, and calls that are repeated, add nothing.
    Seconds of audio, reused and truncated rows are emitted if there are any: each metric costs.
    """
    some: dict[Metric, float] = {}
    if done.audio_seconds:
        some[Metric.AUDIO_SECONDS] = round(done.audio_seconds, 3)
    if done.reused:
        some[Metric.ROWS_REUSED] = done.reused
    if done.truncated:
        some[Metric.ROWS_TRUNCATED] = done.truncated
    return {
        Metric.PROMPT_TOKENS: done.prompt_tokens,
        Metric.CACHED_TOKENS: done.cached_tokens,
        Metric.COMPLETION_TOKENS: done.completion_tokens,
        Metric.ROWS_COMPLETED: done.completed,
        Metric.ROWS_FAILED: done.failed,
        Metric.GPU_SECONDS: round(done.gpu_seconds, 3),
        **some,
    }


logger = Logger(service="tidemill")
