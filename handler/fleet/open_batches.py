"""Open batches: the remaining work of all of them; read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.batch.batch_object import is_over_cost
from tidemill.batch.fleet import OpenWork
from tidemill.batch.model import Batch, Pause
from tidemill.batch.progress import ShardProgress
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.items import load
from ..aws.stores.table import id_of_active
from ..aws.sync import Aws
from ..deployment import Deployment
from ..observability import logger
from .demand import open_work, split_work

_BATCHES_OF_CALL = 100


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """An entry of the list of active batches: its name, and its batch (None if it is missing).

    `shards` is the progress of a batch whose shards can be run.
    """

    name: str
    batch: Batch | None
    shards: ShardProgress | None = None


def read_open_work(aws: Aws, deployment: Deployment, now: int) -> list[OpenWork]:
    """Return the open work of all batches; an unreadable one is logged and skipped.

    The reaper repairs batches, and records which of them are paused.
    """
    found: list[OpenWork] = []
    after = None
    while True:
        names, after = aws.run(deployment.table.page_of_active(after))
        found += [
            work
            for each in read_batches(aws, deployment, names, now)
            if each.batch is not None
            for work in work_of(deployment, each, each.batch.pause_at(now), now)
        ]
        if after is None:
            return found


def read_batches(
    aws: Aws, deployment: Deployment, names: Sequence[str], now: int
) -> list[OpenBatch]:
    """Read batches by their names in the list, in order, with one call per hundred.

    Each running batch costs one more call. An unreadable one is logged and skipped.
    """
    calls = (
        _read_some(deployment, names[first : first + _BATCHES_OF_CALL])
        for first in range(0, len(names), _BATCHES_OF_CALL)
    )
    read = [each for some in aws.run_all(calls) for each in some]
    with_shards = aws.run_all(_with_shards(deployment, each, now) for each in read)
    return [each for each in with_shards if each is not None]


def work_of(
    deployment: Deployment, found: OpenBatch, pause: Pause | None, now: int
) -> list[OpenWork]:
    """Return the open work of a batch with shards to be run, by model; none while it is paused."""
    batch, shards = found.batch, found.shards
    if batch is None or shards is None or pause is not None:
        return []
    progress = shards.progress(now)
    price = deployment.settings.gpu_hour_price_of(batch, progress)
    if shards.num_done >= batch.shards_left or is_over_cost(batch, progress, price):
        return []
    failing = shards.failing(now, deployment.settings.max_attempts)
    num_shards = batch.shards_left - shards.num_done - len(failing)
    work = open_work(batch, progress, num_shards=num_shards, running=shards.leased(now))
    return [work] if batch.escalation is None else split_work(work, batch, shards, failing, now)


def _read_some(deployment: Deployment, names: Sequence[str]) -> Operation[list[OpenBatch]]:
    try:
        fields = yield from deployment.overview.get_batches(map(id_of_active, names))
    except Exception:  # noqa: BLE001 - an error with some must not stop the others
        logger.exception("batches not readable", first=id_of_active(names[0]), number=len(names))
        return []
    return list(_loaded(names, fields))


def _loaded(names: Sequence[str], fields: Mapping[str, Mapping[str, Any]]) -> Iterator[OpenBatch]:
    for name in names:
        own = fields.get(batch_id := id_of_active(name))
        try:
            yield OpenBatch(name, load(Batch, own) if own else None)
        except Exception:  # noqa: BLE001 - an error with one must not stop the others
            logger.exception("batch not readable", batch_id=batch_id)


def _with_shards(deployment: Deployment, found: OpenBatch, now: int) -> Operation[OpenBatch | None]:
    batch = found.batch
    if batch is None or not _runs(batch, now):
        return found
    try:
        shards = yield from deployment.table.get_shard_progress(batch)
    except Exception:  # noqa: BLE001 - an error with one must not stop the others
        logger.exception("batch not readable", batch_id=batch.id)
        return None
    return OpenBatch(found.name, batch, shards)


def _runs(batch: Batch, now: int) -> bool:
    is_running = batch.status is Status.IN_PROGRESS and batch.winds_up_since is None
    return is_running and batch.expires_at > now
