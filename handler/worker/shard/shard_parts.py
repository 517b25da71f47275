"""Parts of a shard's run: its durable rows, and the drafts of the first model of a cascade."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from tidemill.batch.parts import FinishedRow, PartIndex, decode_index, encode_part
from tidemill.batch.progress_counts import Progress
from tidemill.batch.shard_cascade import ShardCascade

from ...aws.calls import Operation, T
from ...observability import logger
from ..context.context import WorkerContext
from .claim import Claim
from .lease import Lease, guarded
from .rows import compact
from .shard_input import ShardInput


class ShardParts:
    """Parts of one claimed shard, written while the lease lasts; `labels` are for log lines."""

    def __init__(
        self, claim: Claim, context: WorkerContext, lease: Lease, labels: Mapping[str, Any]
    ) -> None:
        self.rows, self.drafts = PartIndex(), PartIndex()
        self._shard = claim.shard
        self._context = context
        self._lease = lease
        self._labels = labels
        self._numbers = count()
        self._num_lost = 0

    @property
    def escalated(self) -> frozenset[int]:
        """Return the lines that have only a draft."""
        return self.drafts.lines - self.rows.lines

    @property
    def progress(self) -> Progress:
        """Return the counts of the durable rows and drafts.

        A line of an escalated shard without a readable draft is left to the second model, too.
        """
        counts = self.rows.progress(self.drafts)
        return replace(counts, escalated=counts.escalated + self._num_lost)

    async def read(self, source: ShardInput, cascade: ShardCascade) -> None:
        """Read the rows and drafts of earlier runs; drafts that are sure by now become rows."""
        self.rows = await source.read_parts()
        if cascade.has_drafts:
            drafts = await source.read_parts(are_drafts=True)
            sure = await source.find_sure(drafts, cascade)
            accepted, self.drafts = drafts.split(sure)
            self.rows.merge(accepted)
        if self._shard.is_escalated:
            self._num_lost = self._shard.num_rows - len(self.rows.lines | self.drafts.lines)

    async def write(self, rows: Sequence[FinishedRow]) -> None:
        """Make finished rows and drafts durable."""
        await self._write([row for row in rows if not row.is_draft], self.rows)
        await self._write([row for row in rows if row.is_draft], self.drafts)

    async def _write(self, rows: Sequence[FinishedRow], index: PartIndex) -> None:
        """Make rows durable as a part or a draft, and add them to its index."""
        if not rows:
            return
        data, is_draft = encode_part(rows), rows[0].is_draft
        bucket = self._context.deployment.bucket
        key = await self._retry(
            lambda: bucket.put_part(
                # A new number for each try: a written part is immutable.
                self._shard,
                next(self._numbers),
                data,
                is_draft=is_draft,
            )
        )
        index.add(key, decode_index(data))
        logger.info(
            "part written",
            key=key,
            num_rows=len(rows),
            num_bytes=len(data),
            lines=compact(row.line for row in rows),
            **self._labels,
        )

    async def _retry(self, make: Callable[[], Operation[T]]) -> T:
        return await self._context.retry(lambda: guarded(make(), self._lease.check))
