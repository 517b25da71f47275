"""From a message to the right to run its shard, or to what becomes of the message instead."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.aws.items import dump, load
from handler.aws.queues import advance_message
from handler.batch.model import Batch, EngineInfo, Shard, ShardStatus
from handler.batch.states import Status
from handler.errors import ConditionFailed, LeaseLost
from handler.log import logger
from handler.metrics import Metric
from handler.moves.abandon import abandon
from handler.worker.shard.doorbell import Doorbell, Target
from handler.worker.site.site import Site

_MAX_JITTER_SECONDS = 5.0


class Claim(NamedTuple):
    """A shard that is ours, its batch, and when (by `Site.clock`) the claim was sent."""

    shard: Shard
    batch: Batch
    doorbell: Doorbell
    sent_at: float


async def claim_shard(site: Site, doorbell: Doorbell, *, owner: str) -> Claim | None:
    """Claim the shard that a message rings for.

    None when there is nothing to run: the message has been dealt with then. `owner` is unique to
    this claim. Raises AwsError; the message comes again after such a failure.
    """
    target = doorbell.target
    if target is None:
        logger.warning("message dropped", reason="it names no shard")
        await doorbell.dismiss()
        return None
    if site.wall() < site.over.get(target.batch_id, 0.0):
        # Thousands may wait of a batch that was cancelled, and no GPU is to wait for each of them.
        await doorbell.dismiss()
        return None
    table, lease_seconds = site.deployment.table, site.config.lease_seconds
    sent_at = site.clock()
    try:
        shard = await site.insist(
            lambda: table.claim(*target, owner=owner, now=site.wall(), lease_seconds=lease_seconds)
        )
    except ConditionFailed as exc:
        await _answer_refusal(site, doorbell, target, exc.item)
        return None
    batch = await site.insist(lambda: table.get_batch(target.batch_id))
    reason = why_not_run(batch, shard, site.wall(), site.deployment.settings.max_attempts)
    if batch is not None and reason is None:
        _tell_wait(site, doorbell, batch)
        return Claim(shard, batch, doorbell, sent_at)
    if batch is not None and (batch.is_terminal or batch.winds_up_since is not None):
        site.over[batch.id] = math.inf if batch.expires is None else batch.expires
    await _give_back(site, doorbell, shard, reason or "there is no such batch")
    return None


def why_not_run(batch: Batch | None, shard: Shard, now: float, max_attempts: int) -> str | None:
    """Return why a shard that was just claimed must not be run, or None."""
    if batch is None:
        return "there is no such batch"
    if batch.status is not Status.IN_PROGRESS:
        return f"the batch is {batch.status}"
    if batch.expires_at <= now:
        return "the batch has expired"
    if shard.abandoned is not None:
        return "the shard was given up"
    if shard.attempts > max_attempts:
        return f"{shard.attempts - 1} runs of it ended without a new row"
    return None


async def _answer_refusal(
    site: Site, doorbell: Doorbell, target: Target, item: Mapping[str, Any] | None
) -> None:
    """Deal with the message of a shard that is not there, done, or somebody else's."""
    shard = load(Shard, item) if item else None
    if shard is None:
        logger.warning("message dropped", reason="there is no such shard", **target._asdict())
        await doorbell.dismiss()
    elif shard.status is ShardStatus.DONE:
        await ring_if_last(site, target.batch_id)
        logger.info("message dropped", reason="the shard is done", **target._asdict())
        await doorbell.dismiss()
    else:
        # A fresh copy: one that is received again and again would end among the dead letters.
        jitter = random.uniform(0, min(_MAX_JITTER_SECONDS, site.config.lease_seconds))  # noqa: S311
        delay_seconds = max(0.0, shard.lease_until - site.wall()) + jitter
        logger.info("shard is leased", delay_seconds=delay_seconds, **target._asdict())
        await doorbell.ring_again(delay_seconds)


async def _give_back(site: Site, doorbell: Doorbell, shard: Shard, reason: str) -> None:
    """Release a shard that is not to be run, and ring for its batch."""
    table = site.deployment.table
    is_hopeless = shard.attempts > site.deployment.settings.max_attempts
    release = table.release(
        shard,
        progress=shard.progress.at_rest,
        suspects=shard.suspects,
        quarantined=shard.quarantined,
        attempts=shard.attempts if is_hopeless else shard.attempts - 1,
    )
    try:
        await site.aws.run(release)
    except LeaseLost as exc:  # finalize has taken it meanwhile
        logger.info("lease lost", reason=str(exc), batch_id=shard.batch_id, shard=shard.number)
    if is_hopeless and shard.abandoned is None:
        words = f"The shard was given up: {reason}."
        given_up = abandon(site.deployment, shard.batch_id, shard.number, words, model=site.model)
        await site.aws.run(given_up)
    logger.warning("not run", reason=reason, batch_id=shard.batch_id, shard=shard.number)
    message = advance_message(shard.batch_id)
    await site.aws.run(site.deployment.control.send(message, group=doorbell.group))
    await doorbell.dismiss()


def _tell_wait(site: Site, doorbell: Doorbell, batch: Batch) -> None:
    if doorbell.waited_seconds is not None:
        waited_seconds = round(doorbell.waited_seconds, 3)
        site.tell({Metric.QUEUE_WAIT_SECONDS: waited_seconds}, batch_id=batch.id)


async def ring_if_last(site: Site, batch_id: str) -> None:
    """Ring for a batch that runs and has no shard left."""
    batch = await site.aws.run(site.deployment.table.get_batch(batch_id))
    if batch is None or batch.status is not Status.IN_PROGRESS:
        return
    if await site.aws.run(site.deployment.table.count_left(batch)) == 0:
        message = advance_message(batch_id)
        await site.aws.run(site.deployment.control.send(message, group=batch.tenant))


async def note_engine(site: Site, batch: Batch, engine: EngineInfo) -> None:
    """Let a batch know what runs it, unless it knows already."""
    if batch.engine == EngineInfo():
        fields = dump(engine)
        await site.aws.run(
            site.deployment.table.change_batch(batch.id, Status.IN_PROGRESS, engine=fields)
        )
