"""Dead letters: retries or fails the shard or batch that a dead message was about."""

from __future__ import annotations

from dataclasses import replace

from tidemill.batch.model import Batch, BatchError, ShardStatus
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.queues import (
    MAX_CONTROL_RECEIVES,
    MAX_DELAY_SECONDS,
    advance_message,
    intake_message,
    parse_message,
    retry_seconds,
    shard_message,
)
from ..deployment import Deployment
from ..intake.control_messages import (
    Advance,
    Drop,
    Ignored,
    IntakeStep,
    Sweep,
    TableStep,
    UploadEvent,
    WorkerEvent,
    drop_message,
    parse_control,
)
from ..lifecycle.finish import end
from ..observability import logger
from .reaper import give_up_shard, is_hopeless
from .sweep import EVERY_SECONDS, WINDOW_SECONDS

# Longer than an outage, which is not the file's fault: a batch fails only after that.
PATIENCE_SECONDS = 6 * 3600
# An upload without a batch cannot fail: its event is resent for as long as the sweep would find
# it. An upload that a sweep has found is found again by the next one.
DROP_PATIENCE_SECONDS = WINDOW_SECONDS
FOUND_PATIENCE_SECONDS = EVERY_SECONDS


def handle_dead_letter(deployment: Deployment, body: str, now: int) -> Operation[None]:
    """Handle one dead letter: resend its message if that may help, else fail its shard or batch."""
    match parse_message(body):
        case {"batch_id": str(batch_id), "shard": int(number)} | {
            "batch_id": str(batch_id),
            "escalated_shard": int(number),
        }:
            yield from _handle_shard(deployment, batch_id, number, now)
            return
    for request in parse_control(body):
        match request:
            case Advance(batch_id) | TableStep(batch_id):
                yield from _handle_batch(deployment, batch_id, now)
            case UploadEvent(drop) | (Drop() as drop):
                if (yield from deployment.table.get_batch(drop.batch_id)) is None:
                    yield from _resend_drop(deployment, drop, now)
                else:
                    yield from _handle_batch(deployment, drop.batch_id, now)
            case Sweep():
                logger.error("sweep failed", after=request.after)
            case IntakeStep(batch_id, unit):
                yield from _handle_batch(deployment, batch_id, now, unit)
            case WorkerEvent():
                logger.error("end of a worker not counted")
            case Ignored():
                logger.warning("dead letter dropped", reason=request.reason)


def _resend_drop(deployment: Deployment, drop: Drop, now: int) -> Operation[None]:
    """Resend the message of an upload that has no batch yet."""
    since = drop.failing_since or now
    patience = FOUND_PATIENCE_SECONDS if drop.sequencer is None else DROP_PATIENCE_SECONDS
    logger.error("upload not processed", batch_id=drop.batch_id, key=drop.key, since=since)
    if now - since < patience:
        message = drop_message(replace(drop, failing_since=since))
        group = deployment.settings.tenant_of_drop(drop.key)
        yield from deployment.drops.send(message, group=group, delay_seconds=MAX_DELAY_SECONDS)


def _handle_shard(deployment: Deployment, batch_id: str, number: int, now: int) -> Operation[None]:
    """Resend the message of a shard, or give the shard up after `max_attempts` claims."""
    batch = yield from deployment.table.get_batch(batch_id)
    shard = yield from deployment.table.get_shard(batch_id, number)
    if (
        batch is None
        or shard is None
        or batch.status is not Status.IN_PROGRESS
        or shard.status is ShardStatus.DONE
        or shard.is_leased(now)
    ):
        logger.info("dead letter dropped", batch_id=batch_id, shard=number)
        return
    queue = deployment.work.get(batch.model_of(is_escalated=shard.is_escalated))
    if is_hopeless(deployment, shard):
        yield from give_up_shard(deployment, batch, number, shard.attempts)
    elif not shard.abandoned and queue is not None:
        logger.warning("rung again", batch_id=batch_id, shards=[number])
        message = shard_message(batch_id, number, is_escalated=shard.is_escalated)
        yield from queue.send(message, group=batch.tenant)
        return
    yield from deployment.control.send(advance_message(batch_id), group=batch.tenant)


def _handle_batch(
    deployment: Deployment, batch_id: str, now: int, unit: str | None = None
) -> Operation[None]:
    """Resend the message of a batch; an intake without progress for hours fails it."""
    batch = yield from deployment.table.get_batch(batch_id)
    if batch is None or (batch.is_terminal and (batch.erasing_at is None or batch.erased_at)):
        logger.info("dead letter dropped", batch_id=batch_id)
    elif batch.status is Status.VALIDATING and (yield from _fails_for_long(deployment, batch, now)):
        yield from _fail(deployment, batch, now)
    else:
        logger.error("batch does not advance", batch_id=batch_id, status=str(batch.status))
        queue, message = deployment.control, advance_message(batch_id)
        if unit is not None:
            queue, message = deployment.intake, intake_message(batch_id, unit)
        delay_seconds = retry_seconds(MAX_CONTROL_RECEIVES)
        yield from queue.send(message, group=batch.tenant, delay_seconds=delay_seconds)


def _fails_for_long(deployment: Deployment, batch: Batch, now: int) -> Operation[bool]:
    """Return whether messages have failed for hours without any progress."""
    since = yield from deployment.table.set_once(batch.id, "failing_since", now)
    return since is not None and now - since >= PATIENCE_SECONDS


def _fail(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    hours = PATIENCE_SECONDS // 3600
    error = BatchError(
        "internal_error",
        f"The file could not be read to its end: every attempt failed for {hours} hours. "
        "Upload it again.",
    )
    logger.error("intake failed", batch_id=batch.id)
    yield from end(deployment, batch.id, Status.FAILED, now, errors=(*batch.errors, error))
