"""Prefetch: more shards of a batch than the engine needs, so that lines run in prefix order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from .context.context import WorkerContext
from .shard.line_order import LineOrder
from .shard.shard_run import ShardRun

FEW_SHARDS: Final = 3
"""Waiting lines that keep an engine full; others are prefetched."""

_MAX_SECONDS: Final = 300.0

_REFILL_SHARE: Final = 0.125
"""Lines are prefetched once no more than this share of the allowed number waits."""

_MAX_LIVE: Final = 2_000
"""Maximum shards of a batch that all its workers renew: a partition of the table has a limit."""


class Prefetch:
    """Limits how many lines wait in a worker, and orders the shards that are claimed together.

    They are no more than run in five minutes, nor than half of the worker's share of the remainder,
    so that all workers of a batch end together. No shard is prefetched while one of another batch
    is here; while no line waits, another shard is claimed in any case.
    """

    def __init__(
        self, context: WorkerContext, runs: Sequence[ShardRun], *, num_engines: int = 1
    ) -> None:
        self._context = context
        self._runs = runs
        self._few_shards = FEW_SHARDS * num_engines
        self._max_lines = 0.0
        self._max_shards = self._few_shards
        self._is_filling = True
        self._is_begun = False  # the present fill has a shard
        self._has_enough = False
        self._updated_at = float("-inf")
        self._orders: dict[str, LineOrder] = {}
        self._numbers = count()

    def wants_shard(self, max_inflight: int) -> bool:
        """Return whether to claim another shard; that many waiting lines keep the engines full."""
        num_waiting = sum(run.num_waiting for run in self._runs)
        self._has_enough = num_waiting >= max_inflight
        if num_waiting < max(max_inflight, _REFILL_SHARE * self._max_lines):
            if not self._is_filling:
                self._orders, self._is_begun = {}, False
            self._is_filling = True
        elif num_waiting >= self._max_lines:
            self._is_filling = False
        most = self._context.config.max_shards
        if num_waiting:
            most = min(most, self._max_shards)
        return self._is_filling and len(self._runs) < most

    @property
    def is_ahead(self) -> bool:
        """Return whether the next shard is prefetched: not the first of a fill, nor needed yet."""
        return self._is_begun and self._has_enough

    def order_of(self, batch_id: str) -> LineOrder:
        """Return the order of the shards of a batch that are claimed now, for one of them."""
        self._is_begun = True
        if batch_id not in self._orders:
            self._orders[batch_id] = LineOrder(next(self._numbers))
        return self._orders[batch_id]

    def is_due(self, now: float) -> bool:
        """Return whether the bounds may have changed."""
        return now >= self._updated_at + self._context.config.lease_seconds / 3

    async def update(self) -> None:
        """Set the bounds from this worker's rate, the remaining work and the number of workers."""
        batches = {run.batch.id: run.batch for run in self._runs}
        rate = sum(run.meter.pace.rates.rows_per_second for run in self._runs)
        if len(batches) != 1 or not rate:
            self._max_lines, self._max_shards = 0.0, self._few_shards
            return
        self._updated_at = self._context.clock()
        [batch] = batches.values()
        table = self._context.deployment.table
        num_left = await self._context.aws.run(table.count_left(batch))
        num_workers = max(1, await self._context.aws.run(table.count_workers(batch)))
        share = num_left * batch.num_rows / batch.num_shards / (2 * num_workers - 1)
        self._max_lines = min(_MAX_SECONDS * rate, share)
        self._max_shards = max(self._few_shards, _MAX_LIVE // num_workers)
