"""Demand: the number of workers that a model's open work needs. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidemill.batch.file.expected_tokens import NO_TOKENS
from tidemill.batch.fleet import FleetPlan, OpenWork, WorkerRate
from tidemill.batch.forecast import tokens_left
from tidemill.batch.model import Batch
from tidemill.batch.progress import LiveShard, ShardProgress
from tidemill.batch.progress_counts import Progress

# Close to the end of a window, any extra worker is worth its start.
_LAST_MINUTE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of workers needed, with an explanation for people."""

    count: int
    why: str


def open_work(
    batch: Batch, done: Progress, *, num_shards: int, running: Collection[LiveShard] = ()
) -> OpenWork:
    """Return the remaining work of a batch in progress; workers hold the `running` shards."""
    left = tokens_left(batch, done) if done.num_rows else NO_TOKENS
    return OpenWork(
        batch.id,
        batch.model or "",
        max(0, batch.num_rows - done.num_rows),
        num_shards,
        batch.expires_at,
        num_running=len(running),
        rows_per_second=sum(shard.progress.rows_per_second for shard in running),
        tokens_per_second=sum(shard.progress.tokens_per_second for shard in running),
        since=batch.in_progress_at or batch.created_at,
        tokens_left=left.input + left.output,
        expected_work=(batch.expected - done.expected).work,
        tenant=batch.tenant,
        priority=batch.priority,
    )


def split_work(
    work: OpenWork, batch: Batch, shards: ShardProgress, failing: Sequence[LiveShard], now: float
) -> list[OpenWork]:
    """Return the open work of a cascade by model: shards of the first one, and escalated ones.

    Rows are assumed to be spread evenly over the shards.
    """
    escalated = [shard for shard in shards.live if shard.is_escalated and shard not in failing]
    num_first = work.num_shards - len(escalated)
    num_second = sum(shard.has_escalated_rows for shard in escalated)
    drafted = (shard.progress for shard in shards.live if not shard.is_escalated)
    num_read = sum(each.num_rows + each.escalated for each in drafted)
    rows_first = max(0, round(num_first * batch.num_rows / max(1, batch.num_shards)) - num_read)
    rows = {False: min(work.num_rows, rows_first)}
    rows[True] = work.num_rows - rows[False]
    numbers = {False: num_first, True: 0 if batch.awaits_threshold else num_second}
    found = []
    for is_escalated in (False, True):
        running = [each for each in shards.leased(now) if each.is_escalated is is_escalated]
        share = rows[is_escalated] / max(1, work.num_rows)
        part = replace(
            work,
            model=batch.model_of(is_escalated=is_escalated),
            num_rows=rows[is_escalated],
            num_shards=numbers[is_escalated],
            num_running=len(running),
            rows_per_second=sum(shard.progress.rows_per_second for shard in running),
            tokens_per_second=sum(shard.progress.tokens_per_second for shard in running),
            tokens_left=round(share * work.tokens_left),
            expected_work=0.0 if is_escalated else work.expected_work,
        )
        found += [part] if part.num_shards > 0 else []
    return found


def start_order(open_by_model: Mapping[str, Iterable[OpenWork]]) -> list[str]:
    """Return the models, those first whose workers start first when capacity is short.

    Each tenant's work is in the order of its batches: by priority, then by deadline. The models of
    all tenants' first work come first, so that no priority delays another tenant: those of tenants
    whose work no worker runs, and the others, each by deadline.
    """
    by_tenant: dict[str, list[tuple[int, int, str]]] = {}
    running: set[str] = set()
    for model, works in open_by_model.items():
        for work in works:
            by_tenant.setdefault(work.tenant, []).append((work.priority, work.expires_at, model))
            if work.num_running:
                running.add(work.tenant)
    ranks: dict[str, tuple[int, bool, int]] = {}
    for tenant, each in by_tenant.items():
        deadlines: dict[str, int] = {}  # of each model's first work, in order
        for _, deadline, model in sorted(each):
            deadlines.setdefault(model, deadline)
        for place, (model, deadline) in enumerate(deadlines.items()):
            rank = (place, tenant in running, deadline)
            ranks[model] = min(ranks.get(model, rank), rank)
    return sorted(ranks, key=lambda model: (ranks[model], model))


def estimate_demand(
    work: Iterable[OpenWork],
    rate: WorkerRate,
    plan: FleetPlan,
    *,
    ready_at: Sequence[float],
    now: float,
) -> Demand:
    """Return the number of workers that the open work needs, existing ones included.

    `ready_at` is, for each existing worker, the time at which its model is loaded. Open work should
    be done `target_seconds` after it began, and before its window ends. The number never exceeds
    the plan's maximum or the shards that workers can get; it is at least one with open work.
    """
    todo = [each for each in work if each.num_shards > 0]
    if not todo:
        return Demand(0, "no open work")
    num_held = sum(each.num_running for each in todo)
    waiting = sum(each.num_shards for each in todo) - num_held
    most = max(1, min(plan.max_workers, min(len(ready_at), num_held) + waiting))
    seconds = [estimate_seconds(each, rate) for each in todo]
    if None in seconds:
        return Demand(1, "a worker's rate is not known yet: the first one measures it")
    spans = [span for span in seconds if span is not None]
    targets = [min(each.since + plan.target_seconds, each.expires_at) for each in todo]
    windows = [each.expires_at for each in todo]
    for_target = _needed(
        zip(targets, spans, strict=True), plan, ready_at, now, worth_seconds=plan.start_seconds
    )
    for_windows = _needed(
        zip(windows, spans, strict=True), plan, ready_at, now, worth_seconds=_LAST_MINUTE_SECONDS
    )
    needed = max(1, for_target, for_windows)
    why = f"open work for {sum(spans):.0f} seconds of one worker"
    if needed > most:
        why += f", which needs {needed} workers; at most {most} are useful or allowed"
    return Demand(min(needed, most), why)


def estimate_seconds(work: OpenWork, rate: WorkerRate) -> float | None:
    """Return the seconds that one worker needs for the open work; None without a known rate."""
    if work.tokens_left and rate.tokens_per_second:
        return work.tokens_left / rate.tokens_per_second
    if work.expected_work and rate.expected_work_per_second:
        return work.expected_work / rate.expected_work_per_second
    return work.num_rows / rate.rows_per_second if rate.rows_per_second else None


def _needed(
    due: Iterable[tuple[float, float]],
    plan: FleetPlan,
    ready_at: Sequence[float],
    now: float,
    *,
    worth_seconds: float,
) -> int:
    """Return the number of workers that finish each (end, seconds) of work in time.

    Work that ends earlier is done first. A new worker counts from the end of its start, and for
    `worth_seconds` even if that is too late: more workers would mostly be paid for starting.
    """
    most, open_seconds, ready_in_turn = 0, 0.0, sorted(ready_at)
    for end, seconds in sorted(due):
        open_seconds += seconds
        left, count = open_seconds, 0
        for ready in ready_in_turn:
            if left <= 0:
                break
            left -= max(0.0, end - max(now, ready))
            count += 1
        if left > 0:
            count += math.ceil(left / max(end - now - plan.start_seconds, worth_seconds))
        most = max(most, count)
    return most
