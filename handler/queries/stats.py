"""Statistics of a tenant: active batches, and sums over the ended ones."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from pydantic import BaseModel

from tidemill.batch.batch_object import cost_of
from tidemill.batch.model import Batch
from tidemill.batch.progress import ShardProgress
from tidemill.batch.progress_counts import Progress, sum_of
from tidemill.batch.states import RANK, TERMINAL, Status

from ..aws.sync import Aws
from ..deployment import Deployment

# Of more batches only the oldest are counted in detail: the rest waits for them.
MAX_SURVEYED: Final = 200
_ACTIVE: Final = sorted(set(Status) - TERMINAL, key=lambda status: (RANK[status], status))


class StatsTotals(BaseModel):
    """Sums over batches; `cost` is null if the deployment has no prices."""

    rows_completed: int
    rows_failed: int
    rows_reused: int
    rows_truncated: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audio_seconds: float
    gpu_seconds: float
    cost: float | None


class ActiveStats(StatsTotals):
    """Active batches by status: waiting work, finished work and rates."""

    batches: dict[str, int]
    rows_waiting: int
    shards_waiting: int
    shards_running: int
    rows_per_second: float
    tokens_per_second: float
    input_tokens_per_second: float
    audio_seconds_per_second: float


class EndedStats(StatsTotals):
    """Ended batches by status, since the tenant's first one."""

    batches: dict[str, int]


class StatsObject(BaseModel):
    """All statistics of one tenant at a time (Unix seconds)."""

    object: Literal["stats"] = "stats"
    at: int
    active: ActiveStats
    ended: EndedStats


def tenant_stats(aws: Aws, deployment: Deployment, tenant: str, now: float) -> StatsObject:
    """Return a tenant's current stats; sums are approximate, as their reads differ in time."""
    batches = aws.run(deployment.overview.list_active(tenant))
    running = [batch for batch in batches if batch.in_progress_at is not None][:MAX_SURVEYED]
    found = aws.run_all(deployment.table.get_shard_progress(batch) for batch in running)
    surveys = {
        batch.id: _batch_stats(batch, standing, now)
        for batch, standing in zip(running, found, strict=True)
    }
    total = aws.run(deployment.ledger.get_total(tenant))
    has_prices = bool(deployment.settings.gpu_hour_prices)
    return StatsObject(
        at=int(now),
        active=_active(deployment, batches, surveys),
        ended=EndedStats(
            **_done(total.done, total.cost if has_prices else None),
            batches={str(status): number for status, number in total.batches.items()},
        ),
    )


class _BatchStats(NamedTuple):
    """Progress of a batch, and how many of its shards wait for a worker or have one."""

    progress: Progress = Progress()
    num_waiting: int = 0
    num_running: int = 0


def _batch_stats(batch: Batch, standing: ShardProgress, now: float) -> _BatchStats:
    num_running = len(standing.leased(now))
    num_waiting = batch.shards_left - standing.num_done - num_running
    return _BatchStats(standing.progress(now), num_waiting, num_running)


def _active(
    deployment: Deployment, batches: list[Batch], surveys: dict[str, _BatchStats]
) -> ActiveStats:
    progress = sum_of(survey.progress for survey in surveys.values())
    settings = deployment.settings
    costs = [
        cost_of(done.gpu_seconds, settings.gpu_hour_price_of(batch, done)) or 0.0
        for batch in batches
        if batch.id in surveys
        for done in (surveys[batch.id].progress,)
    ]
    # Shards of cancelled and finalizing batches no longer wait for a worker.
    waiting = [
        (batch, surveys.get(batch.id, _BatchStats(num_waiting=batch.num_shards)))
        for batch in batches
        if batch.status is Status.IN_PROGRESS
    ]
    return ActiveStats(
        **_done(progress, round(sum(costs), 6) if settings.gpu_hour_prices else None),
        batches={
            str(status): sum(batch.status is status for batch in batches) for status in _ACTIVE
        },
        rows_waiting=sum(batch.num_rows - survey.progress.num_rows for batch, survey in waiting),
        shards_waiting=sum(survey.num_waiting for _, survey in waiting),
        shards_running=sum(survey.num_running for _, survey in waiting),
        **progress.rates._asdict(),
    )


def _done(progress: Progress, cost: float | None) -> dict[str, float | None]:
    return {
        "rows_completed": progress.completed,
        "rows_failed": progress.failed,
        "rows_reused": progress.reused,
        "rows_truncated": progress.truncated,
        "prompt_tokens": progress.prompt_tokens,
        "cached_tokens": progress.cached_tokens,
        "completion_tokens": progress.completion_tokens,
        "audio_seconds": round(progress.audio_seconds, 3),
        "gpu_seconds": round(progress.gpu_seconds, 3),
        "cost": cost,
    }
