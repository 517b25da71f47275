"""Cancels a batch: finished rows stay, no other line is run."""

from __future__ import annotations

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..deployment import Deployment
from .announce import announce
from .finish import end

# Checking the claims of more shards than this takes too long.
_MAX_SHARDS_LOOKED_AT = 2000


class NotCancellable(HandlerError):
    """A batch that has ended, or whose rows are all done."""

    code = "not_cancellable"


def cancel(deployment: Deployment, batch_id: str, now: int) -> Operation[Batch | None]:
    """Cancel a batch and return the result, or None if no batch has this ID.

    It is `cancelling` until its finished rows are published, or `cancelled` at once if no line was
    run. Idempotent. Raises NotCancellable.
    """
    moved = yield from deployment.table.move_batch(batch_id, Status.CANCELLING, now)
    batch = moved.batch
    if batch is None or batch.status is Status.CANCELLED:
        return batch
    if not moved.is_there:
        raise NotCancellable(_why_not(batch))
    yield from announce(deployment, batch)
    if not (yield from _was_run(deployment, batch)):
        return (yield from end(deployment, batch_id, Status.CANCELLED, now))
    yield from deployment.control.send(advance_message(batch_id), group=batch.tenant)
    return batch


def _was_run(deployment: Deployment, batch: Batch) -> Operation[bool]:
    """Return whether a worker may have claimed a shard of it; none can while it is validating."""
    if batch.in_progress_at is None:
        return False
    if batch.num_shards > _MAX_SHARDS_LOOKED_AT:
        return True
    shards = yield from deployment.table.list_shards(batch.id)
    return any(shard.fence > 0 for shard in shards)


def _why_not(batch: Batch) -> str:
    if batch.status is Status.FINALIZING:
        return f"Batch {batch.id} is finalizing: its rows are all done."
    return f"Batch {batch.id} has ended: it is {batch.status}."
