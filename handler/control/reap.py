"""What a schedule mends every minute, so that no batch stays on its way for ever.

Why each one ends: a batch that is not terminal stands in the list of active ones, and all of those
are looked at. `validating` and `in_progress` end at the latest with their window. Lost doorbells
are rung again: for a run that has not been heard of, and for shards that nobody has while the queue
is empty or nothing has moved for long. A shard whose claims come to nothing is given up after
`max_attempts` of them. Winding up waits seconds for workers, for older batches (of which the first
waits for none), and for five tries of a delivery. What is not over a day after all that is ended
here, whatever stands in its way, with the reason among its errors. An ended batch stays in the list
until its webhook was told, or did not hear in nine tries: it is rung for when one is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from handler.aws.calls import Operation
from handler.aws.queues import advance_message, shard_message, tens
from handler.aws.stores.table import active_name, id_of_active
from handler.aws.sync import Aws
from handler.batch.fleet import OpenWork
from handler.batch.live import Standing
from handler.batch.model import Batch, BatchError, Shard
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.fleet.ensure import tend
from handler.fleet.wanted import open_work
from handler.intake.ringing import ring_again
from handler.log import logger
from handler.moves.abandon import abandon
from handler.moves.announce import announce
from handler.moves.end import end

# Longer than a run of a Lambda: what has not changed for so long has nobody who works on it.
STUCK_SECONDS = 20 * 60
# Runs that wind a batch up come at least once a minute while the queue works.
SILENT_SECONDS = 3 * 60
OVERDUE_SECONDS = 24 * 3600
# The queue rings for the first tries itself; of those that are hours later nobody else thinks.
WEBHOOK_OVERDUE_SECONDS = 30

_RUNG_AGAIN, _RUNG_AT_ONCE = 10, 5000
_NOTE_SECONDS = 5 * 60
_NUM_THREADS = 8
_LAST: Final = {
    Status.VALIDATING: Status.EXPIRED,
    Status.IN_PROGRESS: Status.EXPIRED,
    Status.FINALIZING: Status.FAILED,
    Status.CANCELLING: Status.CANCELLED,
}


def reap(aws: Aws, deployment: Deployment, now: int) -> None:
    """Look at every active batch, and see to the workers of models that have work.

    A batch that cannot be mended does not keep the others waiting.
    """

    def look_at(name: str) -> OpenWork | None:
        try:
            return aws.run(look(deployment, name, now))
        except Exception:  # noqa: BLE001 - a fault of ours with one must not stop the others
            logger.exception("batch not looked at", batch_id=id_of_active(name))
            return None

    found: list[OpenWork] = []
    num_active, after = 0, None
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        while True:
            names, after = aws.run(deployment.table.page_of_active(after))
            num_active += len(names)
            found += [work for work in pool.map(look_at, names) if work is not None]
            if after is None:
                break
    aws.run(_see_to_workers(deployment, found, now))
    logger.info("reaped", num_active=num_active)


def _see_to_workers(deployment: Deployment, found: Sequence[OpenWork], now: int) -> Operation[None]:
    open_by_model: dict[str, list[OpenWork]] = {}
    for work in found:
        open_by_model.setdefault(work.model, []).append(work)
    try:
        plans = yield from deployment.fleet_plans.read()
    except Exception:  # noqa: BLE001 - in a minute there is another look
        logger.exception("plans of fleets not read")
        return
    yield from tend(deployment, plans, open_by_model, now)


def look(deployment: Deployment, name: str, now: int) -> Operation[OpenWork | None]:
    """Mend what is amiss with an active batch; return what workers have still to do for it."""
    table, batch_id = deployment.table, id_of_active(name)
    work = None
    batch = yield from table.get_batch(batch_id)
    if batch is not None and not batch.is_terminal:
        work = yield from _mend(deployment, batch, now)
        batch = yield from table.get_batch(batch_id)
    if batch is None:
        yield from table.forget_active(name)
        return None
    if name != active_name(batch):  # an earlier version's
        yield from table.rename_active(batch, name)
    yield from announce(deployment, batch)
    if batch.webhook_delivery == "pending" and batch.is_terminal:
        due = batch.webhook_due or batch.ended_at or 0
        if now - due > WEBHOOK_OVERDUE_SECONDS:
            yield from _ring(deployment, batch, "webhook")
    return work


def _mend(deployment: Deployment, batch: Batch, now: int) -> Operation[OpenWork | None]:
    """Do what is missing; return what is open of a batch whose shards are there to be run."""
    winds_up_since = batch.winds_up_since
    if now - max(batch.expires_at, winds_up_since or 0) > OVERDUE_SECONDS:
        yield from _give_up(deployment, batch, now)
    elif winds_up_since is not None:
        if now - max(batch.turn_until, winds_up_since) > SILENT_SECONDS:
            yield from _ring(deployment, batch, "winding up")
    elif batch.status is Status.VALIDATING:
        if batch.expires_at <= now:
            yield from end(deployment, batch.id, Status.EXPIRED, now)
        else:
            yield from _mend_intake(deployment, batch, now)
    elif batch.expires_at <= now:
        yield from _ring(deployment, batch, "end of work")
    else:
        return (yield from _mend_running(deployment, batch, now))
    return None


def _mend_intake(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    """Ring for what is left of the file when none of it has been done for long."""
    reading = yield from deployment.readings.get_reading(batch.id)
    # A file that is made plain first tells of its runs by the turn.
    mark = f"{reading.phase}: {len(reading.left)} left" if reading else f"{batch.turn_until:.0f}"
    if (yield from _is_stuck(deployment, batch, f"intake {mark}", now)):
        is_empty = (yield from deployment.intake.count()) == 0
        logger.info("rung for the batch", batch_id=batch.id, status=str(batch.status), reason=mark)
        yield from ring_again(deployment, batch, reading, None if is_empty else _RUNG_AGAIN)


def _mend_running(deployment: Deployment, batch: Batch, now: int) -> Operation[OpenWork | None]:
    """See to the shards of a batch; return what is open of it."""
    standing = yield from deployment.table.stand(batch)
    if standing.num_done >= batch.shards_left:
        yield from _ring(deployment, batch, "end of work")
        return None
    given_up: set[int] = set()
    if batch.shards_rung >= batch.num_shards:
        given_up = yield from _give_up_hopeless(deployment, batch, standing, now)
        yield from _ring_lost(deployment, batch, standing, given_up, now)
    elif (yield from _is_stuck(deployment, batch, f"rung to {batch.shards_rung}", now)):
        yield from _ring(deployment, batch, "ringing")
    num_shards = batch.shards_left - standing.num_done - len(given_up)
    running = standing.leased(now)
    return open_work(batch, standing.progress(now), num_shards=num_shards, running=running)


def _give_up_hopeless(
    deployment: Deployment, batch: Batch, standing: Standing, now: int
) -> Operation[set[int]]:
    """Give up shards that fail again and again; return all that are given up and not closed."""
    max_attempts = deployment.settings.max_attempts
    given_up = set()
    for live in standing.live:
        if live.is_leased(now) or not (live.is_given_up or live.attempts >= max_attempts):
            continue
        given_up.add(live.number)
        if not live.is_given_up:
            yield from give_up_shard(deployment, batch, live.number, live.attempts)
    if given_up:
        yield from _ring(deployment, batch, "shards given up")
    return given_up


def _ring_lost(
    deployment: Deployment, batch: Batch, standing: Standing, given_up: AbstractSet[int], now: int
) -> Operation[None]:
    """Ring for shards that wait for a worker, where it seems that their doorbells are lost."""
    others = {shard.number for shard in standing.leased(now)} | given_up
    num_left = batch.shards_left - standing.num_done
    num_claims = sum(shard.fence for shard in standing.live)
    num_rows = standing.progress(now).num_rows
    mark = f"{num_left} shards left, {num_claims} claims, {num_rows} rows"
    is_stuck = yield from _is_stuck(deployment, batch, mark, now)
    num_waiting = num_left - len(others)
    queue = deployment.work.get(batch.model or "")
    if num_waiting <= 0:
        return
    if queue is None:
        logger.error("no queue for the model", batch_id=batch.id, model=batch.model)
        return
    is_empty = (yield from queue.count()) == 0
    if not (is_empty or is_stuck):
        return
    # Behind a long queue a batch looks stuck for hours: then a few, or the copies pile up.
    limit = min(num_waiting, _RUNG_AT_ONCE if is_empty else _RUNG_AGAIN)
    numbers = yield from deployment.table.list_waiting(batch.id, others, limit)
    for messages in tens(shard_message(batch.id, number) for number in numbers):
        yield from queue.send_all(messages, group=batch.tenant)
    logger.warning("rung again", batch_id=batch.id, shards=numbers[:100])


def is_hopeless(deployment: Deployment, shard: Shard) -> bool:
    """Say whether a shard that nobody has was claimed often enough without a new row."""
    return not shard.abandoned and shard.attempts >= deployment.settings.max_attempts


def give_up_shard(
    deployment: Deployment, batch: Batch, number: int, attempts: int
) -> Operation[None]:
    """Give up a shard that is hopeless, after so many claims."""
    reason = f"The shard was given up: {attempts} runs of it ended without a new row."
    yield from abandon(deployment, batch.id, number, reason, model=batch.model)


def _give_up(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    status = _LAST[batch.status]
    message = (
        f"The batch was still {batch.status} a day after it should have ended and was given up. "
        "Please report it; rows that were finished and not yet published are kept for a while."
    )
    errors = (*batch.errors, BatchError("internal_error", message))
    logger.error("batch given up", batch_id=batch.id, status=str(batch.status))
    try:
        yield from end(deployment, batch.id, status, now, errors=errors)
    except AwsError:
        logger.exception("no report of the batch", batch_id=batch.id)
        yield from deployment.table.move_batch(batch.id, status, now)


def _is_stuck(deployment: Deployment, batch: Batch, mark: str, now: int) -> Operation[bool]:
    """Say, once in a while, that a batch has been seen like this for long.

    What moves all the time is noted once in a while, too: each note is written twice, for lists.
    """
    is_new, seconds = batch.seen != mark, now - (batch.seen_at or 0)
    is_stuck = not is_new and seconds >= STUCK_SECONDS
    if is_stuck or (is_new and seconds >= _NOTE_SECONDS):
        yield from deployment.table.change_batch(batch.id, batch.status, seen=mark, seen_at=now)
    return is_stuck


def _ring(deployment: Deployment, batch: Batch, reason: str) -> Operation[None]:
    logger.info("rung for the batch", batch_id=batch.id, status=str(batch.status), reason=reason)
    yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)
