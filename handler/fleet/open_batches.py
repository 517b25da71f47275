"""Open batches: what is left to run in all of them, read without changing anything."""

from __future__ import annotations

from tidemill.batch.batch_object import is_over_cost
from tidemill.batch.fleet import OpenWork
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.stores.table import id_of_active
from ..aws.sync import Aws
from ..deployment import Deployment
from ..observability import logger
from .demand import open_work


def read_open_work(aws: Aws, deployment: Deployment, now: int) -> list[OpenWork]:
    """Return the open work of all batches; one that cannot be read is logged and left out.

    The reaper repairs batches, and records which of them are paused.
    """
    found: list[OpenWork | None] = []
    after = None
    while True:
        names, after = aws.run(deployment.table.page_of_active(after))
        found += aws.run_all(_open_work_of(deployment, name, now) for name in names)
        if after is None:
            return [work for work in found if work is not None]


def _open_work_of(deployment: Deployment, name: str, now: int) -> Operation[OpenWork | None]:
    batch_id = id_of_active(name)
    try:
        return (yield from _read(deployment, batch_id, now))
    except Exception:  # noqa: BLE001 - an error with one must not stop the others
        logger.exception("batch not looked at", batch_id=batch_id)
        return None


def _read(deployment: Deployment, batch_id: str, now: int) -> Operation[OpenWork | None]:
    batch = yield from deployment.table.get_batch(batch_id)
    if batch is None or batch.status is not Status.IN_PROGRESS:
        return None
    if batch.winds_up_since is not None or batch.expires_at <= now or batch.pause_at(now):
        return None
    standing = yield from deployment.table.get_shard_progress(batch)
    progress, price = standing.progress(now), deployment.settings.gpu_hour_price(batch.model)
    if is_over_cost(batch, progress, price):
        return None
    failing = standing.failing(now, deployment.settings.max_attempts)
    num_shards = batch.shards_left - standing.num_done - len(failing)
    return open_work(batch, progress, num_shards=num_shards, running=standing.leased(now))
