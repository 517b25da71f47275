"""Precedence: shards of a tenant's batches that run before the shard that a message announces.

A queue delivers messages about in the order of arrival. If another batch of the tenant comes first,
by its priority or its deadline, a worker claims one of its shards instead and sends the message
again. The queue alone decides between tenants.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ...aws.calls import OperationDriver
from ...aws.stores.overview import BatchPlace
from ...deployment import Deployment
from ...errors import AwsError
from ...observability import logger

_KNOWN_SECONDS = 15.0
_MAX_BATCHES = 8
_MAX_SHARDS = 200
_TURNS = 8


@dataclass(slots=True)
class _Known:
    """Places of a tenant's batches, and the waiting shards of those that were read."""

    until: float
    places: Mapping[str, BatchPlace]
    shards: dict[str, list[int]] = field(default_factory=dict)


class Precedence:
    """Finds shards that come first; every eighth time none, so that every batch makes progress.

    It reads the table every 15 seconds per tenant. A failed read finds none. `model` is the model
    of the worker, `driver` runs operations.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._num_found = 0

    async def find(
        self,
        driver: OperationDriver,
        deployment: Deployment,
        batch_id: str,
        *,
        tenant: str,
        model: str | None,
        now: float,
    ) -> tuple[str, int] | None:
        """Return the batch and number of a waiting shard that comes before those of a batch.

        It returns each shard once, and None without one.
        """
        try:
            known = self._known.get(tenant)
            if known is None or known.until <= now:
                places = await driver.run(deployment.overview.list_places(tenant))
                others = self._known.items()
                self._known = {name: each for name, each in others if now < each.until}
                known = self._known[tenant] = _Known(now + _KNOWN_SECONDS, places)
            for first in _before(known.places, batch_id):
                if first not in known.shards:
                    waiting = _waiting(driver, deployment, first, model, now)
                    known.shards[first] = await waiting
                if known.shards[first]:
                    self._num_found += 1
                    if not self._num_found % _TURNS:
                        return None
                    return first, known.shards[first].pop()
        except AwsError as exc:
            logger.warning("the order of batches is unknown", reason=str(exc))
            self._known[tenant] = _Known(now + _KNOWN_SECONDS, {})
        return None


def _before(places: Mapping[str, BatchPlace], batch_id: str) -> list[str]:
    """Return the batches that come before one, the first of them first."""
    own = places.get(batch_id)
    if own is None:
        return []
    found = [(place, name) for name, place in places.items() if place.is_before(own)]
    return [name for _, name in sorted(found)[:_MAX_BATCHES]]


async def _waiting(
    driver: OperationDriver, deployment: Deployment, batch_id: str, model: str | None, now: float
) -> list[int]:
    """Return shards of a batch that a worker of this model can claim, in random order."""
    batch = await driver.run(deployment.table.get_batch(batch_id))
    if batch is None or batch.model_of(is_escalated=False) != model or not _can_run(batch, now):
        return []
    progress = await driver.run(deployment.table.get_shard_progress(batch))
    failing = progress.failing(now, deployment.settings.max_attempts)
    others = {shard.number for shard in (*progress.leased(now), *failing)}
    others |= {shard.number for shard in progress.live if shard.is_escalated}
    numbers = await driver.run(deployment.table.list_waiting(batch_id, others, _MAX_SHARDS))
    random.shuffle(numbers)  # so that workers try different ones
    return numbers


def _can_run(batch: Batch, now: float) -> bool:
    is_running = batch.status is Status.IN_PROGRESS and batch.winds_up_since is None
    return is_running and batch.expires_at > now and batch.pause_at(now) is None
