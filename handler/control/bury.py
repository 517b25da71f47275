"""What becomes of messages that were received again and again: the batch ends with the truth."""

from __future__ import annotations

from dataclasses import replace

from handler.aws.calls import Operation
from handler.aws.queues import (
    MAX_CONTROL_RECEIVES,
    MAX_DELAY_SECONDS,
    advance_message,
    again_seconds,
    intake_message,
    parse_message,
    shard_message,
)
from handler.batch.keys import DROP_TENANT
from handler.batch.model import Batch, BatchError, ShardStatus
from handler.batch.states import Status
from handler.control.reap import give_up_shard, is_hopeless
from handler.control.sweep import EVERY_SECONDS, WINDOW_SECONDS
from handler.deployment import Deployment
from handler.intake.events import (
    Advance,
    Drop,
    Ended,
    Ignored,
    Intake,
    Sweep,
    Uploaded,
    drop_message,
    parse_control,
)
from handler.log import logger
from handler.moves.end import end

# An outage is no fault of the file: only what fails for longer than those last ends a batch.
PATIENCE_SECONDS = 6 * 3600
# An upload that has no batch cannot even fail: its event is told again for as long as the sweep
# would find it. What a sweep has found the next one finds again.
DROP_PATIENCE_SECONDS = WINDOW_SECONDS
FOUND_PATIENCE_SECONDS = EVERY_SECONDS


def bury(deployment: Deployment, body: str, now: int) -> Operation[None]:
    """Deal with one dead message: ring again where that may help, end what cannot go on."""
    match parse_message(body):
        case {"batch_id": str(batch_id), "shard": int(number)}:
            yield from _bury_shard(deployment, batch_id, number, now)
            return
    for request in parse_control(body):
        match request:
            case Advance(batch_id):
                yield from _bury_batch(deployment, batch_id, now)
            case Uploaded(drop) | (Drop() as drop):
                if (yield from deployment.table.get_batch(drop.batch_id)) is None:
                    yield from _tell_again(deployment, drop, now)
                else:
                    yield from _bury_batch(deployment, drop.batch_id, now)
            case Sweep():
                logger.error("sweep not done", after=request.after)
            case Intake(batch_id, unit):
                yield from _bury_batch(deployment, batch_id, now, unit)
            case Ended():
                logger.error("end of a worker not counted")
            case Ignored():
                logger.warning("dead message dropped", reason=request.reason)


def _tell_again(deployment: Deployment, drop: Drop, now: int) -> Operation[None]:
    """Send for an upload that has no batch yet and that nobody else knows of."""
    since = drop.failing_since or now
    patience = FOUND_PATIENCE_SECONDS if drop.sequencer is None else DROP_PATIENCE_SECONDS
    logger.error("upload not taken in", batch_id=drop.batch_id, key=drop.key, since=since)
    if now - since < patience:
        message = drop_message(replace(drop, failing_since=since))
        yield from deployment.control.send(
            message, group=DROP_TENANT, delay_seconds=MAX_DELAY_SECONDS
        )


def _bury_shard(deployment: Deployment, batch_id: str, number: int, now: int) -> Operation[None]:
    """Ring for a shard again, or give it up once its own count of failures says so."""
    batch = yield from deployment.table.get_batch(batch_id)
    shard = yield from deployment.table.get_shard(batch_id, number)
    if (
        batch is None
        or shard is None
        or batch.status is not Status.IN_PROGRESS
        or shard.status is ShardStatus.DONE
        or shard.is_leased(now)
    ):
        logger.info("dead message dropped", batch_id=batch_id, shard=number)
        return
    queue = deployment.work.get(batch.model or "")
    if is_hopeless(deployment, shard):
        yield from give_up_shard(deployment, batch, number, shard.attempts)
    elif not shard.abandoned and queue is not None:
        logger.warning("rung again", batch_id=batch_id, shards=[number])
        yield from queue.send(shard_message(batch_id, number), group=batch.tenant)
        return
    yield from deployment.control.send(advance_message(batch_id), group=batch.tenant)


def _bury_batch(
    deployment: Deployment, batch_id: str, now: int, unit: str | None = None
) -> Operation[None]:
    """Ring again; a file whose reading has come no further for hours fails."""
    batch = yield from deployment.table.get_batch(batch_id)
    if batch is None or batch.is_terminal:
        logger.info("dead message dropped", batch_id=batch_id)
    elif batch.status is Status.VALIDATING and (yield from _fails_for_long(deployment, batch, now)):
        yield from _fail(deployment, batch, now)
    else:
        logger.error("batch does not advance", batch_id=batch_id, status=str(batch.status))
        queue, message = deployment.control, advance_message(batch_id)
        if unit is not None:
            queue, message = deployment.intake, intake_message(batch_id, unit)
        delay_seconds = again_seconds(MAX_CONTROL_RECEIVES)
        yield from queue.send(message, group=batch.tenant, delay_seconds=delay_seconds)


def _fails_for_long(deployment: Deployment, batch: Batch, now: int) -> Operation[bool]:
    """Say whether messages have died for long, and no run has come further meanwhile."""
    since = yield from deployment.table.set_once(batch.id, "failing_since", now)
    return since is not None and now - since >= PATIENCE_SECONDS


def _fail(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    hours = PATIENCE_SECONDS // 3600
    error = BatchError(
        "internal_error",
        f"The file could not be read to its end: every run of {hours} hours failed. "
        "Please upload it again.",
    )
    logger.error("intake failed", batch_id=batch.id)
    yield from end(deployment, batch.id, Status.FAILED, now, errors=(*batch.errors, error))
