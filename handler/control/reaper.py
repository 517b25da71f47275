"""Reaper: checks every active batch each minute, repairs stuck batches, and scales the fleets.

Every batch ends, because each non-terminal batch is in the list of active ones, and all of those
are checked. `validating` and `in_progress` end with their window at the latest. Lost messages are
sent again: for a run without progress, and for unclaimed shards if the queue is empty or nothing
has changed for long. A shard is given up after `max_attempts` claims without a new row. Finishing
waits seconds for workers, for older batches (the first of them waits for none), and for five
delivery attempts. A batch that is not over a day after all that is ended here, with the reason in
its errors. An ended batch stays in the list until its webhook is delivered or has failed nine
times: a message is sent when a try is due. An erased batch stays in it until nothing is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from tidemill.batch.batch_object import is_over_cost
from tidemill.batch.fleet import OpenWork
from tidemill.batch.model import Batch, BatchError, Pause, Shard
from tidemill.batch.progress import ShardProgress
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..aws.stores.table import active_name, erasing_name, id_of_active
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import AwsError
from ..fleet.open_batches import OpenBatch, read_batches, work_of
from ..fleet.pause import record_pause
from ..fleet.scale import scale_fleets
from ..intake.unit_messages import enqueue_again
from ..lifecycle.announce import announce
from ..lifecycle.finish import abandon, end
from ..observability import Metric, emit, logger

# Longer than a Lambda run: an item unchanged for that long has no run working on it.
STUCK_SECONDS = 20 * 60
# Runs that finish a batch happen at least once a minute while the queue works.
SILENT_SECONDS = 3 * 60
OVERDUE_SECONDS = 24 * 3600
# The queue delays the first tries itself; the reaper triggers those that are hours later.
WEBHOOK_OVERDUE_SECONDS = 30

_MAX_RESENT, _MAX_RESENT_TO_EMPTY = 10, 5000
_NOTE_SECONDS = 5 * 60
_NUM_THREADS = 8
# Runs begin every minute, and one ends before the next begins. Fleets are scaled after the reads.
_READ_SECONDS, _RUN_SECONDS = 35, 50
# Names per read of the list, and batches repaired between two checks of the deadline.
_PAGE, _CHUNK = 1000, 64
_LAST: Final = {
    Status.VALIDATING: Status.EXPIRED,
    Status.IN_PROGRESS: Status.EXPIRED,
    Status.FINALIZING: Status.FAILED,
    Status.CANCELLING: Status.CANCELLED,
}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Round:
    """State that one run of the reaper reads once for all batches.

    `pauses` has the reason why a tenant's batches wait, None while they may run, and `depths` the
    number of messages in each model's queue. An unreadable value is absent from its dict.
    """

    now: int
    pauses: Mapping[str, Pause | None]
    depths: Mapping[str, int]


def reap(
    aws: Aws, deployment: Deployment, now: int, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Read the active batches, scale the fleets of models that have work, then repair batches.

    A batch that cannot be read or repaired does not block the others. A run that reaches its
    deadline stores a cursor, at which the next one begins.
    """
    started = clock()
    first = aws.run(deployment.overview.get_reaper_cursor())
    pages = _read_pages(aws, deployment, first, now)
    seen: list[OpenBatch] = []
    after = first
    for batches, after in pages:
        seen += batches
        if after is not None and clock() - started > _READ_SECONDS:
            break
    this = read_round(aws, deployment, seen, now)
    is_spent = aws.run(deployment.limits.is_budget_spent(now))
    if is_spent:
        emit({Metric.BUDGET_SPENT: 1}, model=None)
    aws.run(
        _scale_workers(deployment, open_work_of(deployment, seen, this), now, is_spent=is_spent)
    )
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(seen), _CHUNK):
            if start and clock() - started > _RUN_SECONDS:
                after = seen[start - 1].name
                break
            list(pool.map(partial(_check, aws, deployment, this), seen[start : start + _CHUNK]))
    if after != first:
        aws.run(deployment.overview.put_reaper_cursor(after))
    logger.info("reaped", num_active=len(seen), is_all=first is None and after is None)


def _read_pages(
    aws: Aws, deployment: Deployment, first: str | None, now: int
) -> Iterator[tuple[list[OpenBatch], str | None]]:
    """Yield the active batches in pages, with the name that the next page follows.

    They begin after the name `first` and wrap around to it. The last page has None.
    """
    after, has_wrapped = first, first is None
    while True:
        names, last = aws.run(deployment.table.page_of_active(after, limit=_PAGE))
        if has_wrapped and first is not None and (last is None or last >= first):
            names, last = [name for name in names if name <= first], None
        elif last is None and not has_wrapped:
            has_wrapped, after = True, None
            yield read_batches(aws, deployment, names, now), names[-1] if names else first
            continue
        yield read_batches(aws, deployment, names, now), last
        if last is None:
            return
        after = last


def read_round(aws: Aws, deployment: Deployment, seen: Sequence[OpenBatch], now: int) -> Round:
    """Read the pause of each tenant and the depth of each queue that these batches need."""
    running = [each.batch for each in seen if each.batch is not None and each.shards is not None]
    tenants = sorted({batch.tenant for batch in running})
    waiting = {model for each in seen for model in _models_that_wait(each, now)}
    models = sorted(waiting & deployment.work.keys())
    limits = deployment.limits
    pauses = aws.run_all(_attempt("pause", limits.find_pause(each, now)) for each in tenants)
    depths = aws.run_all(_attempt("depth", deployment.work[each].count()) for each in models)
    return Round(
        now,
        {tenant: found[0] for tenant, found in zip(tenants, pauses, strict=True) if found},
        {model: found[0] for model, found in zip(models, depths, strict=True) if found},
    )


def _models_that_wait(found: OpenBatch, now: int) -> list[str]:
    """Return the models of a batch with shards that no worker holds; none without such shards."""
    batch, shards = found.batch, found.shards
    if batch is None or shards is None:
        return []
    has_waiting = batch.shards_left - shards.num_done > len(shards.leased(now))
    stages = (False,) if batch.awaits_threshold else (False, True)
    return [batch.model_of(is_escalated=each) for each in stages] if has_waiting else []


def _attempt(what: str, operation: Operation[T]) -> Operation[tuple[T] | None]:
    """Return the result of an operation in a tuple; None for one that fails, which is logged."""
    try:
        return ((yield from operation),)
    except Exception:  # noqa: BLE001 - an error with one must not stop the others
        logger.exception("not read", what=what)
        return None


def open_work_of(deployment: Deployment, seen: Iterable[OpenBatch], this: Round) -> list[OpenWork]:
    """Return the open work of those batches whose shards are not paused."""
    return [
        work
        for each in seen
        if each.batch is not None and each.batch.tenant in this.pauses
        for work in work_of(deployment, each, this.pauses[each.batch.tenant], this.now)
    ]


def _scale_workers(
    deployment: Deployment, found: Sequence[OpenWork], now: int, *, is_spent: bool
) -> Operation[None]:
    try:
        plans = yield from deployment.fleet_plans.read()
    except Exception:  # noqa: BLE001 - the next run is in a minute
        logger.exception("fleet plans could not be read")
        return
    yield from scale_fleets(deployment, plans, found, now, keeps_ready=not is_spent)


def _check(aws: Aws, deployment: Deployment, this: Round, found: OpenBatch) -> None:
    try:
        aws.run(check_batch(deployment, found, this))
    except Exception:  # noqa: BLE001 - an error with one must not stop the others
        logger.exception("batch could not be repaired", batch_id=id_of_active(found.name))


def check_batch(deployment: Deployment, found: OpenBatch, this: Round) -> Operation[None]:
    """Repair an active batch; a healthy one costs no call."""
    table, batch, name = deployment.table, found.batch, found.name
    if batch is not None and not batch.is_terminal:
        has_ended = yield from _mend(deployment, found, this)
        is_announced = batch.announced is batch.status and name == active_name(batch)
        if is_announced and not has_ended:
            return
    if batch is not None:  # by now it may have been announced, or have moved on
        batch = yield from table.get_batch(batch.id)
    if batch is None:
        yield from table.forget_active(name)
        return
    if name == erasing_name(batch):
        yield from _mend_erasure(deployment, batch, name, this.now)
        return
    if name != active_name(batch):  # an earlier version's
        yield from table.rename_active(batch, name)
    yield from announce(deployment, batch)
    if batch.webhook_delivery == "pending" and batch.is_terminal:
        due = batch.webhook_due or batch.ended_at or 0
        if this.now - due > WEBHOOK_OVERDUE_SECONDS:
            yield from _send_advance(deployment, batch, "webhook")


def _mend(deployment: Deployment, found: OpenBatch, this: Round) -> Operation[bool]:
    """Do the missing step, and return whether that may have ended the batch."""
    batch, now = found.batch, this.now
    assert batch is not None
    winds_up_since = batch.winds_up_since
    if now - max(batch.expires_at, winds_up_since or 0) > OVERDUE_SECONDS:
        yield from _give_up(deployment, batch, now)
        return True
    if winds_up_since is not None:
        if now - max(batch.turn_until, winds_up_since) > SILENT_SECONDS:
            yield from _send_advance(deployment, batch, "winding up")
    elif batch.status is Status.VALIDATING:
        if batch.expires_at <= now:
            yield from end(deployment, batch.id, Status.EXPIRED, now)
            return True
        yield from _mend_intake(deployment, batch, now)
    elif batch.expires_at <= now:
        yield from _send_advance(deployment, batch, "end of work")
    elif found.shards is not None:
        yield from _mend_running(deployment, batch, found.shards, this)
    return False


def _mend_erasure(deployment: Deployment, batch: Batch, name: str, now: int) -> Operation[None]:
    """Resend the message of an erasure that is overdue: it was lost, or the input was in use."""
    if batch.erased_at is not None:
        yield from deployment.table.forget_active(name)
    elif (yield from _is_stuck(deployment, batch, "erasing", now)):
        yield from _send_advance(deployment, batch, "erasure")


def _mend_intake(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    """Resend the messages of an intake that has made no progress for long."""
    reading = yield from deployment.intake_progress.get_progress(batch.id)
    # The conversion of a file shows its runs only by the lock.
    mark = f"{reading.phase}: {len(reading.left)} left" if reading else f"{batch.turn_until:.0f}"
    if (yield from _is_stuck(deployment, batch, f"intake {mark}", now)):
        is_empty = (yield from deployment.intake.count()) == 0
        logger.info("message resent", batch_id=batch.id, status=str(batch.status), reason=mark)
        yield from enqueue_again(deployment, batch, reading, None if is_empty else _MAX_RESENT)


def _mend_running(
    deployment: Deployment, batch: Batch, standing: ShardProgress, this: Round
) -> Operation[None]:
    """Check the shards of a batch, and record whether it is paused."""
    now, progress = this.now, standing.progress(this.now)
    price = deployment.settings.gpu_hour_price_of(batch, progress)
    is_decided = batch.awaits_threshold and standing.are_decided(batch.shards_left)
    is_done = standing.num_done >= batch.shards_left
    if is_done or is_decided or is_over_cost(batch, progress, price):
        yield from _send_advance(deployment, batch, "end of work")
        return
    if batch.tenant not in this.pauses:
        return
    pause = yield from record_pause(deployment, batch, this.pauses[batch.tenant], now)
    if batch.shards_rung >= batch.num_shards:
        given_up = yield from _give_up_failing(deployment, batch, standing, now)
        if pause is None:
            yield from _resend_lost(deployment, batch, standing, given_up, this)
    elif (yield from _is_stuck(deployment, batch, f"rung to {batch.shards_rung}", now)):
        yield from _send_advance(deployment, batch, "ringing")


def _give_up_failing(
    deployment: Deployment, batch: Batch, standing: ShardProgress, now: int
) -> Operation[set[int]]:
    """Give up shards that fail repeatedly; return all abandoned ones that are not closed."""
    failing = standing.failing(now, deployment.settings.max_attempts)
    for live in failing:
        if not live.is_given_up:
            yield from give_up_shard(deployment, batch, live.number, live.attempts)
    if failing:
        yield from _send_advance(deployment, batch, "shards given up")
    return {live.number for live in failing}


def _resend_lost(
    deployment: Deployment,
    batch: Batch,
    standing: ShardProgress,
    given_up: AbstractSet[int],
    this: Round,
) -> Operation[None]:
    """Resend the messages of waiting shards that seem to be lost."""
    now = this.now
    others = {shard.number for shard in standing.leased(now)} | given_up
    num_left = batch.shards_left - standing.num_done
    num_claims = sum(shard.fence for shard in standing.live)
    progress = standing.progress(now)
    num_rows = progress.num_rows + progress.escalated
    mark = f"{num_left} shards left, {num_claims} claims, {num_rows} rows"
    is_stuck = yield from _is_stuck(deployment, batch, mark, now)
    settled = {shard.number for shard in standing.to_close(batch)} - others
    if settled:
        yield from _send_advance(deployment, batch, "shards without escalated rows")
    others |= settled
    escalated = [
        shard.number for shard in standing.live if shard.is_escalated and shard.number not in others
    ]
    num_waiting = {True: len(escalated), False: num_left - len(others) - len(escalated)}
    for is_escalated, count in num_waiting.items():
        model = batch.model_of(is_escalated=is_escalated)
        queue, is_empty = deployment.work.get(model), this.depths.get(model) == 0
        if count <= 0 or (is_escalated and batch.awaits_threshold):
            continue
        if queue is None:
            logger.error("model has no queue", batch_id=batch.id, model=model)
            continue
        if not (is_empty or is_stuck):
            continue
        # In a long queue a batch looks stuck for hours: few messages are sent, or copies pile up.
        limit = min(count, _MAX_RESENT_TO_EMPTY if is_empty else _MAX_RESENT)
        numbers = escalated[:limit]
        if not is_escalated:
            others |= {*escalated}
            numbers = yield from deployment.table.list_waiting(batch.id, others, limit)
        yield from queue.send_shards(
            batch.id, numbers, group=batch.tenant, is_escalated=is_escalated
        )
        logger.warning("rung again", batch_id=batch.id, shards=numbers[:100])


def is_hopeless(deployment: Deployment, shard: Shard) -> bool:
    """Return whether an unclaimed shard has used up its claims without a new row."""
    return not shard.abandoned and shard.attempts >= deployment.settings.max_attempts


def give_up_shard(
    deployment: Deployment, batch: Batch, number: int, attempts: int
) -> Operation[None]:
    """Give up a shard after `attempts` claims without a new row."""
    reason = f"The shard was given up: no new row in {attempts} attempts."
    yield from abandon(deployment, batch.id, number, reason, model=batch.model)


def _give_up(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    status = _LAST[batch.status]
    message = (
        f"The batch was still {batch.status} a day after its deadline and was given up. "
        "Please report this; rows that were not published yet are stored for a while."
    )
    errors = (*batch.errors, BatchError("internal_error", message))
    logger.error("batch given up", batch_id=batch.id, status=str(batch.status))
    try:
        yield from end(deployment, batch.id, status, now, errors=errors)
    except AwsError:
        logger.exception("report of the batch could not be written", batch_id=batch.id)
        yield from deployment.table.move_batch(batch.id, status, now)


def _is_stuck(deployment: Deployment, batch: Batch, mark: str, now: int) -> Operation[bool]:
    """Return whether a batch has not changed for long; at most once per STUCK_SECONDS.

    The mark of a batch that changes constantly is written only every few minutes.
    """
    is_new, seconds = batch.seen != mark, now - (batch.seen_at or 0)
    is_stuck = not is_new and seconds >= STUCK_SECONDS
    if is_stuck or (is_new and seconds >= _NOTE_SECONDS):
        yield from deployment.table.change_batch(batch.id, batch.status, seen=mark, seen_at=now)
    return is_stuck


def _send_advance(deployment: Deployment, batch: Batch, reason: str) -> Operation[None]:
    logger.info("message resent", batch_id=batch.id, status=str(batch.status), reason=reason)
    yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)
