"""What a schedule mends every few minutes, so that no batch stays on its way for ever.

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
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Final

from handler.aws.calls import Operation
from handler.aws.queues import advance_message, shard_message, tens
from handler.aws.sync import Aws
from handler.batch.fleet import OpenWork
from handler.batch.model import Batch, BatchError, Progress, Shard, ShardStatus
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.fleet.ensure import tend
from handler.fleet.wanted import open_work
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

_RUNG_AGAIN = 10
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

    def look_at(batch_id: str) -> OpenWork | None:
        try:
            return aws.run(look(deployment, batch_id, now))
        except Exception:  # noqa: BLE001 - a fault of ours with one must not stop the others
            logger.exception("batch not looked at", batch_id=batch_id)
            return None

    ids = aws.run(deployment.table.list_active())
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = [work for work in pool.map(look_at, ids) if work is not None]
    aws.run(_see_to_workers(deployment, found, now))
    logger.info("reaped", num_active=len(ids))


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


def look(deployment: Deployment, batch_id: str, now: int) -> Operation[OpenWork | None]:
    """Mend what is amiss with one batch; return what workers have still to do for it."""
    table = deployment.table
    work = None
    batch = yield from table.get_batch(batch_id)
    if batch is not None and not batch.is_terminal:
        work = yield from _mend(deployment, batch, now)
        batch = yield from table.get_batch(batch_id)
    if batch is None:
        yield from table.forget_active(batch_id)
        return None
    yield from announce(deployment, batch)
    if batch.webhook_delivery == "pending" and batch.is_terminal:
        due = batch.webhook_due or batch.ended_at or 0
        if now - due > WEBHOOK_OVERDUE_SECONDS:
            yield from _ring(deployment, batch, "webhook")
    return work


def _mend(deployment: Deployment, batch: Batch, now: int) -> Operation[OpenWork | None]:
    """Do what is missing; return what is open of a batch whose shards are there to be run."""
    winds_up_since = batch.winds_up_since
    is_expired = batch.expires_at <= now
    if now - max(batch.expires_at, winds_up_since or 0) > OVERDUE_SECONDS:
        yield from _give_up(deployment, batch, now)
    elif winds_up_since is not None:
        if now - max(batch.turn_until, winds_up_since) > SILENT_SECONDS:
            yield from _ring(deployment, batch, "winding up")
    elif batch.status is Status.VALIDATING:
        if is_expired:
            yield from end(deployment, batch.id, Status.EXPIRED, now)
        elif (yield from _is_stuck(deployment, batch, f"read to {_short(batch.checkpoint)}", now)):
            yield from _ring(deployment, batch, "intake")
    elif is_expired or batch.shards_left == 0:
        yield from _ring(deployment, batch, "end of work")
    elif batch.shards_rung < batch.num_shards:
        if (yield from _is_stuck(deployment, batch, f"rung to {batch.shards_rung}", now)):
            yield from _ring(deployment, batch, "ringing")
        return open_work(batch, Progress(), num_shards=batch.shards_left)
    else:
        return (yield from _mend_shards(deployment, batch, now))
    return None


def _mend_shards(deployment: Deployment, batch: Batch, now: int) -> Operation[OpenWork]:
    """Give up shards that fail again and again, and ring for those whose doorbell is lost."""
    shards = yield from deployment.table.list_shards(batch.id)
    free = [
        shard
        for shard in shards
        if shard.status is ShardStatus.PENDING and not shard.is_leased(now)
    ]
    hopeless = [shard for shard in free if is_hopeless(deployment, shard)]
    for shard in hopeless:
        yield from give_up_shard(deployment, batch, shard)
    if hopeless or any(shard.abandoned for shard in free):
        yield from _ring(deployment, batch, "shards given up")
    waiting = [shard for shard in free if not shard.abandoned and shard not in hopeless]
    mark = f"{batch.shards_left} shards left, {sum(shard.fence for shard in shards)} claims"
    is_stuck = yield from _is_stuck(deployment, batch, mark, now)
    queue = deployment.work.get(batch.model or "")
    if waiting and queue is None:
        logger.error("no queue for the model", batch_id=batch.id, model=batch.model)
    elif (
        waiting
        and queue is not None
        and ((is_empty := (yield from queue.count()) == 0) or is_stuck)
    ):
        # Behind a long queue a batch looks stuck for hours: then a few, or the copies pile up.
        rung = waiting if is_empty else waiting[:_RUNG_AGAIN]
        for messages in tens(shard_message(batch.id, shard.number) for shard in rung):
            yield from queue.send_all(messages, group=batch.tenant)
        logger.warning("rung again", batch_id=batch.id, shards=_numbers(rung))
    done = sum((shard.progress for shard in shards), start=Progress())
    leased = [shard for shard in shards if shard.is_leased(now)]
    return open_work(batch, done, num_shards=len(waiting) + len(leased), running=leased)


def is_hopeless(deployment: Deployment, shard: Shard) -> bool:
    """Say whether a shard that nobody has was claimed often enough without a new row."""
    return not shard.abandoned and shard.attempts >= deployment.settings.max_attempts


def give_up_shard(deployment: Deployment, batch: Batch, shard: Shard) -> Operation[None]:
    """Give up a shard that is hopeless."""
    reason = f"The shard was given up: {shard.attempts} runs of it ended without a new row."
    yield from abandon(deployment, shard, reason, model=batch.model)


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
    """Say, once in a while, that a batch has been seen like this for long."""
    is_new = batch.seen != mark or batch.seen_at is None
    is_stuck = not is_new and now - (batch.seen_at or 0) >= STUCK_SECONDS
    if is_new or is_stuck:
        yield from deployment.table.change_batch(batch.id, batch.status, seen=mark, seen_at=now)
    return is_stuck


def _ring(deployment: Deployment, batch: Batch, reason: str) -> Operation[None]:
    logger.info("rung for the batch", batch_id=batch.id, status=str(batch.status), reason=reason)
    yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)


def _short(text: str | None) -> str:
    return blake2b((text or "").encode(), digest_size=8).hexdigest()


def _numbers(shards: Sequence[Shard]) -> list[int]:
    return [shard.number for shard in shards[:100]]
