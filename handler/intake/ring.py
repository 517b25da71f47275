"""Ringing for the shards of a batch, as far as a run comes."""

from __future__ import annotations

from collections.abc import Callable

from handler.aws.queues import advance_message, shard_message, tens
from handler.aws.sync import Aws
from handler.batch.model import Batch
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.log import logger
from handler.moves.turn import RESERVE_SECONDS
from handler.moves.wake import wake

# How many shards are rung for between two notes of how far it is.
_RING_AT_ONCE = 1000


def ring_shards(
    aws: Aws, deployment: Deployment, batch: Batch, time_left: Callable[[], float]
) -> None:
    """Ring for the shards not rung for yet and see that there is a worker to hear it.

    What the time does not allow, the next run does.
    Two runs may do so at once, and a shard be rung for twice: that changes nothing.
    """
    queue = deployment.work.get(batch.model or "")
    if queue is None:
        logger.error("no queue for the model", batch_id=batch.id, model=batch.model)
        return
    rung = batch.shards_rung
    while rung < batch.num_shards:
        until = min(rung + _RING_AT_ONCE, batch.num_shards)
        for messages in tens(shard_message(batch.id, number) for number in range(rung, until)):
            aws.run(queue.send_all(messages))
        if rung == batch.shards_rung:
            aws.run(wake(deployment, batch.model))
        rung = until
        noted = deployment.table.change_batch(batch.id, Status.IN_PROGRESS, shards_rung=rung)
        if aws.run(noted) is None:
            logger.info("ringing stops", batch_id=batch.id, shards_rung=rung)
            return
        if rung < batch.num_shards and time_left() < RESERVE_SECONDS:
            aws.run(deployment.control.send(advance_message(batch.id)))
            return
    logger.info("shards rung for", batch_id=batch.id, num_shards=batch.num_shards)
