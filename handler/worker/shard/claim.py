"""Claim: acquires the lease on a message's shard, or disposes of the message."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from tidemill.batch.model import Batch, EngineInfo, Pause, Shard, ShardStatus
from tidemill.batch.states import Status

from ...aws.items import dump, load
from ...aws.queues import MAX_DELAY_SECONDS, advance_message, shard_message
from ...errors import AwsError, ConditionFailed, LeaseLost
from ...lifecycle.finish import abandon
from ...observability import Metric, logger
from ..context.context import KnownPause, WorkerContext
from .message import ShardMessage, ShardTarget

_MAX_JITTER_SECONDS = 5.0
# A batch with thousands of shards is not read again for each of their messages.
_PAUSE_KNOWN_SECONDS = 60.0
_END_KNOWN_SECONDS = 3600.0  # of one whose record does not expire yet
_FEW_SHARDS = 100
# Claims of shards that come first, before the message's own.
_MAX_TRIES = 3


class Claim(NamedTuple):
    """A claimed shard, its batch, and the time (by `WorkerContext.clock`) of the claim."""

    shard: Shard
    batch: Batch
    message: ShardMessage
    sent_at: float


async def claim_shard(
    context: WorkerContext, message: ShardMessage, *, owner: str, is_prefetch: bool = False
) -> Claim | None:
    """Claim the shard that a message names.

    Returns None if there is nothing to run: the message has then been handled. `owner` is unique to
    this claim. Raises AwsError; the message then reappears after its visibility timeout. A
    prefetch is a claim while enough lines wait to keep the engines full.
    """
    target = message.target
    if target is None:
        logger.warning("message dropped", reason="it names no shard")
        await message.delete()
        return None
    if context.wall() < context.ended_batches.get(target.batch_id, 0.0):
        # A cancelled batch may have thousands of messages; the GPU must not wait for each of them.
        await message.delete()
        return None
    known = context.paused_batches.get(target.batch_id)
    if known is not None and (now := context.wall()) < known.known_until:
        await message.resend(min(MAX_DELAY_SECONDS, known.until - now))
        return None
    first = await _claim_first(context, message, target, owner, is_prefetch=is_prefetch)
    if first is not None:
        return first
    table = context.deployment.table
    sent_at = context.clock()
    try:
        shard = await _claim(context, target, owner)
    except ConditionFailed as exc:
        await _handle_claim_refusal(context, message, target, exc.item)
        return None
    batch = await context.retry(lambda: table.get_batch(target.batch_id))
    reason = skip_reason(batch, shard, context.wall(), context.deployment.settings.max_attempts)
    if batch is not None and reason is None and (pause := batch.pause_at(context.wall())):
        await _put_off(context, message, shard, pause)
        return None
    if batch is not None and reason is None:
        _emit_queue_wait(context, message, batch)
        return Claim(shard, batch, message, sent_at)
    if batch is not None and (batch.is_terminal or batch.winds_up_since is not None):
        _note_end(context, batch)
    await _give_back(context, message, shard, reason or "the batch does not exist")
    return None


async def _claim(context: WorkerContext, target: ShardTarget, owner: str) -> Shard:
    table, lease_seconds = context.deployment.table, context.config.lease_seconds
    return await context.retry(
        lambda: table.claim(
            target.batch_id,
            target.shard,
            owner=owner,
            now=context.wall(),
            lease_seconds=lease_seconds,
            is_escalated=target.is_escalated,
        )
    )


async def _claim_first(
    context: WorkerContext,
    message: ShardMessage,
    target: ShardTarget,
    owner: str,
    *,
    is_prefetch: bool,
) -> Claim | None:
    """Claim a shard that comes before the message's, which is then sent again; None without one."""
    if message.group is None:
        return None
    deployment = context.deployment
    for _ in range(_MAX_TRIES):
        found = await context.precedence.find(
            context.aws,
            deployment,
            target.batch_id,
            tenant=message.group,
            model=context.model,
            now=context.wall(),
            is_prefetch=is_prefetch,
        )
        if found is None:
            return None
        first, sent_at = ShardTarget(*found), context.clock()
        try:
            shard = await _claim(context, first, owner)
        except ConditionFailed:  # another worker was faster
            continue
        try:
            batch = await context.retry(partial(deployment.table.get_batch, first.batch_id))
            reason = skip_reason(batch, shard, context.wall(), deployment.settings.max_attempts)
            if batch is None or reason is not None or batch.pause_at(context.wall()):
                context.precedence.drop(message.group, first.batch_id)
                await _release(context, shard, attempts=shard.attempts - 1)
                return None
            await message.resend()
        except AwsError:  # no message of the shard is held, whose timeout would repeat the claim
            await _release(context, shard, attempts=shard.attempts - 1)
            raise
        logger.info("another batch comes first", batch_id=batch.id, shard=shard.number)
        return Claim(shard, batch, ShardMessage.unheld(context, first, message.group), sent_at)
    return None


def skip_reason(batch: Batch | None, shard: Shard, now: float, max_attempts: int) -> str | None:
    """Return the reason not to run a shard that was just claimed, or None."""
    if batch is None:
        return "the batch does not exist"
    if batch.status is not Status.IN_PROGRESS:
        return f"the batch is {batch.status}"
    if batch.expires_at <= now:
        return "the batch has expired"
    if shard.abandoned is not None:
        return "the shard was given up"
    if shard.is_escalated and batch.awaits_threshold:
        return "the threshold is not known yet"
    if shard.attempts > max_attempts:
        return f"no new row in {shard.attempts - 1} attempts"
    return None


async def _handle_claim_refusal(
    context: WorkerContext,
    message: ShardMessage,
    target: ShardTarget,
    item: Mapping[str, Any] | None,
) -> None:
    """Handle the message of a shard that is missing, done, or leased by another worker."""
    shard = load(Shard, item) if item else None
    if shard is None:
        logger.warning("message dropped", reason="the shard does not exist", **target._asdict())
        await message.delete()
    elif shard.status is ShardStatus.DONE:
        await advance_if_done(context, target.batch_id)
        logger.info("message dropped", reason="the shard is done", **target._asdict())
        await message.delete()
    elif shard.is_escalated is not target.is_escalated:
        batch = await context.aws.run(context.deployment.table.get_batch(target.batch_id))
        if batch is not None and shard.is_escalated and not shard.is_leased(context.wall()):
            await continue_escalated(context, batch, shard)  # its sender may have died before that
        logger.info("message dropped", reason="another model has the shard", **target._asdict())
        await message.delete()
    else:
        # A fresh message: after too many receives the old one would become a dead letter.
        jitter = random.uniform(0, min(_MAX_JITTER_SECONDS, context.config.lease_seconds))  # noqa: S311
        delay_seconds = max(0.0, shard.lease_until - context.wall()) + jitter
        logger.info("shard is leased", delay_seconds=delay_seconds, **target._asdict())
        await message.resend(delay_seconds)


async def _put_off(
    context: WorkerContext, message: ShardMessage, shard: Shard, pause: Pause
) -> None:
    """Release a shard whose batch is paused, and send its message again for later."""
    now = context.wall()
    known_until = min(pause.until, now + _PAUSE_KNOWN_SECONDS)
    context.paused_batches[shard.batch_id] = KnownPause(pause.until, known_until)
    await _release(context, shard, attempts=shard.attempts - 1)
    logger.info("put off", reason=pause.code, batch_id=shard.batch_id, shard=shard.number)
    await message.resend(min(MAX_DELAY_SECONDS, pause.until - now))


async def _release(context: WorkerContext, shard: Shard, *, attempts: int) -> None:
    release = context.deployment.table.release(
        shard,
        progress=shard.progress.without_rates,
        suspects=shard.suspects,
        quarantined=shard.quarantined,
        attempts=attempts,
    )
    try:
        await context.aws.run(release)
    except LeaseLost as exc:  # finalize has claimed it in the meantime
        logger.info("lease lost", reason=str(exc), batch_id=shard.batch_id, shard=shard.number)


async def _give_back(
    context: WorkerContext, message: ShardMessage, shard: Shard, reason: str
) -> None:
    """Release a shard that is not to be run, and send a message to advance its batch."""
    is_hopeless = shard.attempts > context.deployment.settings.max_attempts
    await _release(context, shard, attempts=shard.attempts if is_hopeless else shard.attempts - 1)
    if is_hopeless and shard.abandoned is None:
        words = f"The shard was given up: {reason}."
        given_up = abandon(
            context.deployment, shard.batch_id, shard.number, words, model=context.model
        )
        await context.aws.run(given_up)
    logger.warning("not run", reason=reason, batch_id=shard.batch_id, shard=shard.number)
    advance = advance_message(shard.batch_id)
    await context.aws.run(context.deployment.control.send(advance, group=message.group))
    await message.delete()


def _emit_queue_wait(context: WorkerContext, message: ShardMessage, batch: Batch) -> None:
    if message.waited_seconds is not None:
        waited_seconds = round(message.waited_seconds, 3)
        context.emit({Metric.QUEUE_WAIT_SECONDS: waited_seconds}, batch_id=batch.id)


async def continue_escalated(context: WorkerContext, batch: Batch, shard: Shard) -> None:
    """Send the message of an escalated shard to the workers of the batch's second model.

    While its threshold is unknown, the batch advances instead once all shards are decided.
    """
    if batch.awaits_threshold:
        await _advance_if_decided(context, batch)
        return
    model = batch.model_of(is_escalated=True)
    queue = context.deployment.work.get(model)
    if queue is None:
        logger.error("model has no queue", batch_id=batch.id, model=model)
        return
    message = shard_message(batch.id, shard.number, is_escalated=True)
    await context.retry(lambda: queue.send(message, group=batch.tenant))


async def _advance_if_decided(context: WorkerContext, batch: Batch) -> None:
    """Send a message to advance a batch whose first model has decided all shards.

    The reaper notices that in batches with many shards, whose progress is long.
    """
    if batch.num_shards > _FEW_SHARDS:
        return
    progress = await context.aws.run(context.deployment.table.get_shard_progress(batch))
    if progress.are_decided(batch.shards_left):
        message = advance_message(batch.id)
        await context.aws.run(context.deployment.control.send(message, group=batch.tenant))


async def advance_if_done(context: WorkerContext, batch_id: str) -> bool:
    """Return whether a running batch has no shard left; if so, send a message to advance it.

    Once it has none, or has ended, its other messages are dropped without a read.
    """
    batch = await context.aws.run(context.deployment.table.get_batch(batch_id))
    if batch is not None and (batch.is_terminal or batch.winds_up_since is not None):
        _note_end(context, batch)
    if batch is None or batch.status is not Status.IN_PROGRESS:
        return False
    is_done = await context.aws.run(context.deployment.table.count_left(batch)) == 0
    if is_done:
        _note_end(context, batch)
        message = advance_message(batch_id)
        await context.aws.run(context.deployment.control.send(message, group=batch.tenant))
    return is_done


def _note_end(context: WorkerContext, batch: Batch) -> None:
    known_until = context.wall() + _END_KNOWN_SECONDS if batch.expires is None else batch.expires
    context.ended_batches[batch.id] = known_until


async def note_engine(context: WorkerContext, batch: Batch, engine: EngineInfo) -> None:
    """Record the engine that runs a batch, unless it is recorded."""
    if batch.engine == EngineInfo():
        fields = dump(engine)
        await context.aws.run(
            context.deployment.table.change_batch(batch.id, Status.IN_PROGRESS, engine=fields)
        )
