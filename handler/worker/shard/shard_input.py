"""Input of a shard's run: its lines, its durable rows, and the results that need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from tempfile import SpooledTemporaryFile
from typing import Any

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.parts import FinishedRow, PartIndex
from tidemill.batch.shard_cascade import ShardCascade

from ...aws.bucket import read_range
from ...aws.calls import Operation, T
from ...errors import NotThere, ObjectChanged
from ...observability import logger
from ..context.context import WorkerContext
from .claim import Claim
from .lease import Lease, guarded
from .media_access import refuse_media
from .rows import compact

# A longer shard is a single line, of which only the digest is stored.
_READ_BYTES = 64 * 2**20


class ShardInput:
    """Input of one claimed shard, read while the lease lasts; `labels` are for log lines."""

    def __init__(
        self, claim: Claim, context: WorkerContext, lease: Lease, labels: Mapping[str, Any]
    ) -> None:
        self._batch = claim.batch
        self._shard = claim.shard
        self._context = context
        self._lease = lease
        self._labels = labels
        self._result_keys: dict[int, bytes] = {}

    async def read_parts(self, *, are_drafts: bool = False) -> PartIndex:
        """Return the index of the rows, or drafts, that earlier runs made durable."""

        def left_out(key: str, reason: str) -> None:
            logger.error("part unreadable", key=key, reason=reason, **self._labels)

        bucket, shard = self._context.deployment.bucket, self._shard
        return await self._retry(
            lambda: bucket.index_parts(
                shard.batch_id, shard.number, left_out=left_out, are_drafts=are_drafts
            )
        )

    async def find_sure(self, drafts: PartIndex, cascade: ShardCascade) -> set[int]:
        """Return the lines whose draft is their row, because the threshold was learnt after it."""
        found: set[int] = set()
        if self._batch.escalation is None or self._batch.escalation.learnt is None:
            return found
        bucket = self._context.deployment.bucket
        for key, places in drafts.places().items():
            part = await self._retry(partial(bucket.get, key))
            found.update(await asyncio.to_thread(cascade.sure_lines, part, places))
        return found

    async def with_first_answers(
        self, rows: Sequence[FinishedRow], drafts: PartIndex, cascade: ShardCascade
    ) -> list[FinishedRow]:
        """Return rows of which those that failed with the second model are the first one's."""
        failed = {row.line: row for row in rows if row.line in drafts and cascade.replaces(row)}
        bucket = self._context.deployment.bucket
        for key, places in drafts.places(failed).items() if failed else ():
            start, end = min(each.start for each in places), max(each.end for each in places)
            part = await self._retry(partial(bucket.get_range, key, start, end))
            for place in places:
                draft = part[place.start - start : place.end - start]
                failed[place.line] = cascade.with_draft(failed[place.line], draft)
        return [failed.get(row.line, row) for row in rows]

    async def read_lines(self) -> list[RawLine]:
        """Return the lines of the shard; raises ObjectChanged if the input has changed."""
        shard = self._shard
        with SpooledTemporaryFile(max_size=_READ_BYTES) as file:
            for start in range(shard.start, shard.end, _READ_BYTES):
                end = min(start + _READ_BYTES, shard.end)
                make = partial(read_range, self._batch.source, start, end)
                try:
                    file.write(await self._retry(make))
                except NotThere as exc:
                    raise ObjectChanged("the object no longer exists") from exc
            file.seek(0)
            lines = list(read_lines(file, first_number=shard.first_line))
        if len(lines) != shard.num_rows:
            raise ObjectChanged(f"the shard has {len(lines)} lines, not {shard.num_rows}")
        return lines

    async def refuse_media(self, lines: Sequence[RawLine]) -> dict[int, FinishedRow]:
        """Return the rows of lines that name an object in S3 which the tenant may not read."""
        allowed = AllowedMedia(self._context.deployment.bucket.name, self._batch.tenant)
        return await asyncio.to_thread(refuse_media, lines, allowed)

    async def reuse_results(self, lines: Sequence[RawLine]) -> Collection[FinishedRow]:
        """Return the rows of those lines that have a stored result."""
        kept = self._context.kept_results
        if kept is None:
            return ()
        found = await kept.look_up(self._batch, lines)
        self._result_keys = found.keys
        if found.rows:
            logger.info("rows reused", lines=compact(found.rows), **self._labels)
        return found.rows.values()

    async def keep_results(self, index: PartIndex) -> None:
        """Store the results of computed lines for later batches of the tenant."""
        kept, keys = self._context.kept_results, self._result_keys
        if kept is not None and keys:
            await kept.keep(self._batch, self._shard, keys, index)

    async def _retry(self, make: Callable[[], Operation[T]]) -> T:
        return await self._context.retry(lambda: guarded(make(), self._lease.check))
