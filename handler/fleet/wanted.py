"""How many workers a model's open work wants. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from handler.batch.fleet import FleetPlan, OpenWork, Pace
from handler.batch.live import Live
from handler.batch.model import Batch, Progress

# For the end of a window any help is worth its start.
_LAST_MINUTE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers are wanted, and why, for a person who wonders."""

    count: int
    why: str


def open_work(
    batch: Batch, done: Progress, *, num_shards: int, running: Collection[Live] = ()
) -> OpenWork:
    """Return what is left of a batch in progress, of which workers have the `running` shards."""
    tokens = done.prompt_tokens + done.completion_tokens
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
        tokens_per_row=tokens / done.num_rows if done.num_rows else 0.0,
    )


def wanted(
    work: Iterable[OpenWork], pace: Pace, plan: FleetPlan, *, ready_at: Sequence[float], now: float
) -> Wanted:
    """Return how many workers the open work wants, those there are among them.

    `ready_at` is, for each worker there is, when it has or will have loaded its model. What is open
    is to be done `target_seconds` after it began, and before its window ends. Never more than
    can have a shard, or than the plan allows; at least one while anything is open.
    """
    todo = [each for each in work if each.num_shards > 0]
    if not todo:
        return Wanted(0, "nothing is open")
    num_held = sum(each.num_running for each in todo)
    waiting = sum(each.num_shards for each in todo) - num_held
    most = max(1, min(plan.max_workers, min(len(ready_at), num_held) + waiting))
    seconds = [seconds_of(each, pace) for each in todo]
    if None in seconds:
        return Wanted(1, "the rate of a worker is not known yet: the first one measures it")
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
    why = f"{sum(spans):.0f} seconds of one worker are open"
    if needed > most:
        why += f", for which {needed} would be right; no more than {most} are of use or allowed"
    return Wanted(min(needed, most), why)


def seconds_of(work: OpenWork, pace: Pace) -> float | None:
    """Return how long one worker takes for what is open; None while no rate is known."""
    if work.tokens_per_row and pace.tokens_per_second:
        return work.num_rows * work.tokens_per_row / pace.tokens_per_second
    return work.num_rows / pace.rows_per_second if pace.rows_per_second else None


def _needed(
    due: Iterable[tuple[float, float]],
    plan: FleetPlan,
    ready_at: Sequence[float],
    now: float,
    *,
    worth_seconds: float,
) -> int:
    """Return how many workers do each (end, seconds) with all that ends before it, in time.

    A new one counts from the end of its start, and for `worth_seconds` even where that is too late:
    more of them would mostly be paid for starting.
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
