"""Precedence: shards of a tenant's batches that run before the shard that a message announces.

A queue delivers messages about in the order of arrival. If another batch of the tenant comes first,
by its priority or its deadline, a worker claims one of its shards instead and sends the message
again. The queue alone decides between tenants, and retries failed shards after their timeouts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ...aws.calls import OperationDriver
from ...aws.stores.overview import BatchPlace
from ...deployment import Deployment
from ...errors import AwsError
from ...observability import logger

_KNOWN_SECONDS = 60.0
_USED_SECONDS = 15.0
_MAX_BATCHES = 32
_MAX_SHARDS = 200
_TURNS = 8

FreshShard: TypeAlias = tuple[str, int, bool]
"""Batch and number of a shard without an owner, and whether its second model has to run it."""


@dataclass(slots=True)
class _Known:
    """Places of a tenant's batches, and the fresh shards of the first of those that were read.

    `order` are batches that may have such shards, the first of them first, without those known to
    be `of_other_models`. `num_left` is the number of batches that may still be read.
    """

    until: float
    places: Mapping[str, BatchPlace]
    of_other_models: set[str]
    num_left: int = _MAX_BATCHES
    order: deque[str] = field(init=False)
    shards: dict[str, list[FreshShard]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the batches."""
        self.of_other_models &= self.places.keys()
        known = self.places.keys() - self.of_other_models
        self.order = deque(sorted(known, key=self.places.__getitem__))


class Precedence:
    """Finds shards that come first; every eighth time none, so that every batch makes progress.

    It reads the table once a minute per tenant, and every 15 seconds while shards come first. A
    failed read finds none.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._num_found = 0
        self._is_others_turn = False

    async def find(
        self,
        driver: OperationDriver,
        deployment: Deployment,
        batch_id: str,
        *,
        tenant: str,
        model: str | None,
        now: float,
        is_prefetch: bool = False,
    ) -> FreshShard | None:
        """Return a fresh shard that comes before those of a batch.

        It returns each shard once, and None without one. `model` is the model of the worker, the
        first or the second one of a cascade; a prefetch takes the turn of the claim before it, so
        that a batch's shards stay together.
        """
        try:
            known = await self._known_of(driver, deployment, tenant, now)
            reader = _Reader(driver, deployment, model, now)
            first = await reader.first_before(known, batch_id)
        except AwsError as exc:
            logger.warning("the order of batches is unknown", reason=str(exc))
            self._known[tenant] = _Known(now + _KNOWN_SECONDS, {}, set())
            return None
        if first is None:
            return None
        if not is_prefetch:
            self._num_found += 1
            self._is_others_turn = self._num_found % _TURNS == 0
        if self._is_others_turn:
            return None
        known.until = min(known.until, now + _USED_SECONDS)
        return known.shards[first].pop()

    def drop(self, tenant: str, batch_id: str) -> None:
        """Forget the shards of a batch that no longer runs."""
        if (known := self._known.get(tenant)) is not None:
            known.shards[batch_id] = []

    async def _known_of(
        self, driver: OperationDriver, deployment: Deployment, tenant: str, now: float
    ) -> _Known:
        known = self._known.get(tenant)
        if known is None or known.until <= now:
            places = await driver.run(deployment.overview.list_places(tenant))
            others = set() if known is None else known.of_other_models
            self._known = {name: each for name, each in self._known.items() if now < each.until}
            known = self._known[tenant] = _Known(now + _KNOWN_SECONDS, places, others)
        return known


class _Reader(NamedTuple):
    """Reads of the table for a worker of one model."""

    driver: OperationDriver
    deployment: Deployment
    model: str | None
    now: float

    async def first_before(self, known: _Known, batch_id: str) -> str | None:
        """Return the first batch with fresh shards, None if it does not come before a batch."""
        own, order = known.places.get(batch_id), known.order
        while own is not None and order and known.places[order[0]] < own:
            first = order[0]
            if first not in known.shards:
                if not known.num_left:
                    return None
                known.num_left -= 1
                known.shards[first] = await self._list_fresh(known, first)
            if known.shards[first]:
                return first
            order.popleft()
        return None

    async def _list_fresh(self, known: _Known, batch_id: str) -> list[FreshShard]:
        """Return shards of a batch that this worker can claim, in random order.

        Those whose last run failed are left to their messages, which wait for a visibility timeout.
        """
        table = self.deployment.table
        batch = await self.driver.run(table.get_batch(batch_id))
        if batch is None or not _can_run(batch, self.now):
            return []
        is_first = batch.model_of(is_escalated=False) == self.model
        if not is_first and batch.model_of(is_escalated=True) != self.model:
            known.of_other_models.add(batch_id)
            return []
        if not is_first and batch.awaits_threshold:
            return []
        progress = await self.driver.run(table.get_shard_progress(batch))
        used = {
            shard.number
            for shard in progress.live
            if shard.attempts or shard.is_leased(self.now) or shard.is_given_up
        }
        if not is_first:
            escalated = [each.number for each in progress.live if each.has_escalated_rows]
            numbers = [number for number in escalated if number not in used][:_MAX_SHARDS]
            random.shuffle(numbers)
            return [(batch_id, number, True) for number in numbers]
        others = used | {shard.number for shard in progress.live if shard.is_escalated}
        if batch.shards_left - progress.num_done <= len(others):
            return []
        start = random.randrange(max(1, batch.num_shards))  # noqa: S311
        pending = await self.driver.run(table.list_some_pending(batch_id, start))
        numbers = [number for number in pending if number not in others][:_MAX_SHARDS]
        random.shuffle(numbers)  # so that workers try different ones
        return [(batch_id, number, False) for number in numbers]


def _can_run(batch: Batch, now: float) -> bool:
    is_running = batch.status is Status.IN_PROGRESS and batch.winds_up_since is None
    return is_running and batch.expires_at > now and batch.pause_at(now) is None
