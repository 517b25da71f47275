"""Stored results: replies of a tenant's earlier batches, and those stored for later ones.

An error with them stops no shard: its lines are run, and nothing is looked up for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from tidemill.batch.file.lines import Line, LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_cached, reply_body
from tidemill.batch.model import Batch, Shard
from tidemill.batch.object_keys import results_prefix
from tidemill.batch.parts import FinishedRow, PartIndex
from tidemill.batch.result_key import Kept, ResultKeys, Scope

from ..aws.bucket import Bucket
from ..aws.calls import Operation, OperationDriver, T
from ..aws.objects.result_store import PACK_BYTES, Drive, ResultStore
from ..observability import logger

R = TypeVar("R")

_LOOK_UP_SECONDS: Final = 60.0
_KEEP_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 60.0

DigestAt = Callable[[int], bytes | None]
"""Digest of everything except requests that determines results, for a batch created at a time."""


class Lookup(NamedTuple):
    """Reused rows of lines, and the keys of lines whose results may be stored, by line."""

    rows: dict[int, FinishedRow]
    keys: dict[int, bytes]


_NOTHING: Final = Lookup({}, {})


class KeptResults:
    """Stored results in a deployment's bucket, separate for each tenant; one per worker.

    The worker's engine serves `served_names`, adapters included. `max_bytes` bounds the results
    of a tenant. With `sampled`, non-deterministic results are stored and reused, too. `drive` runs
    operations from any thread.
    """

    def __init__(
        self,
        drive: Drive,
        bucket: Bucket,
        served_names: Sequence[str],
        digest_at: DigestAt,
        *,
        max_bytes: int,
        sampled: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drive = drive
        self._bucket = bucket
        self._model = served_names[0]
        self._digest_at = digest_at
        self._max_bytes = max_bytes
        self._keys = ResultKeys(served_names, sampled)
        self._clock = clock
        self._stores: dict[tuple[str, bytes], ResultStore] = {}
        self._opening = asyncio.Lock()
        self._paused_until = float("-inf")

    async def look_up(self, batch: Batch, lines: Iterable[RawLine]) -> Lookup:
        """Return the rows of those lines for which the batch's tenant has stored results."""
        found = await self._guarded(_LOOK_UP_SECONDS, self._look_up(batch, lines))
        return found or _NOTHING

    async def keep(
        self, batch: Batch, shard: Shard, keys: dict[int, bytes], index: PartIndex
    ) -> None:
        """Store the computed replies of a shard's lines, by their keys."""
        await self._guarded(_KEEP_SECONDS, self._keep(batch, shard, keys, index))

    def close(self) -> None:
        """Delete the local files."""
        for store in self._stores.values():
            store.close()

    async def _guarded(self, seconds: float, work: Coroutine[object, object, R]) -> R | None:
        if self._clock() < self._paused_until:
            work.close()
            return None
        try:
            async with asyncio.timeout(seconds):
                return await work
        except Exception as exc:  # noqa: BLE001 - no shard depends on it
            logger.warning("results not reused", reason=str(exc) or repr(exc))
            self._paused_until = self._clock() + _PAUSE_SECONDS
            return None

    async def _look_up(self, batch: Batch, lines: Iterable[RawLine]) -> Lookup:
        store = await self._store(batch)
        if store is None:
            return _NOTHING
        return await asyncio.to_thread(self._look_up_in, store, batch.created_at, lines)

    def _look_up_in(self, store: ResultStore, created: int, lines: Iterable[RawLine]) -> Lookup:
        rows, keys, num_damaged = {}, {}, store.num_damaged
        for raw in lines:
            line, key = self._keyed(raw)
            if line is None or key is None:
                continue
            body = store.find(key, line.digest, created)
            if body is None:
                keys[raw.number] = key
            else:
                row = print_cached(line, body)
                rows[raw.number] = FinishedRow(raw.number, row, is_success=True, is_reused=True)
        if store.num_damaged > num_damaged:
            logger.warning("damaged results ignored", count=store.num_damaged - num_damaged)
        return Lookup(rows, keys)

    def _keyed(self, raw: RawLine) -> tuple[Line | None, bytes | None]:
        try:
            line = parse_line(raw)
        except LineError:
            return None, None
        return line, self._keys.key_of(line.url, line.body, line.digest)

    async def _keep(
        self, batch: Batch, shard: Shard, keys: dict[int, bytes], index: PartIndex
    ) -> None:
        store = await self._store(batch) if keys else None
        if store is None:
            return
        source = f"{batch.id}-{shard.number:07}-{shard.fence:06}"
        packs = self._packs(batch.created_at, keys, index)

        def write() -> None:
            for number, replies in enumerate(packs):
                store.write(f"{source}-{number:04}", replies)

        await asyncio.to_thread(write)

    def _packs(
        self, created: int, keys: dict[int, bytes], index: PartIndex
    ) -> Iterator[dict[bytes, Kept]]:
        replies: dict[bytes, Kept] = {}
        num_bytes = 0
        for part, places in index.computed().items():
            wanted = [place for place in places if place.line in keys]
            data = self._drive(self._bucket.get(part)) if wanted else b""
            for place in wanted:
                digest, body = reply_body(data[place.start : place.end])
                replies[keys[place.line]] = Kept(digest, created, body)
                num_bytes += len(body)
            if num_bytes >= PACK_BYTES:
                yield replies
                replies, num_bytes = {}, 0
        if replies:
            yield replies

    async def _store(self, batch: Batch) -> ResultStore | None:
        async with self._opening:
            digest = await asyncio.to_thread(self._digest_at, batch.created_at)
            if digest is None:
                return None
            known = self._stores.get((batch.tenant, digest))
            if known is None:
                prefix, scope = results_prefix(batch.tenant), Scope(digest, self._model)
                known = ResultStore(self._drive, self._bucket, prefix, scope, self._max_bytes)
                self._stores[batch.tenant, digest] = known
            return known


class ThreadDrive:
    """Runs operations in the event loop that created it, on behalf of other threads."""

    def __init__(self, aws: OperationDriver) -> None:
        self._aws = aws
        self._loop = asyncio.get_running_loop()

    def __call__(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises AwsError."""
        return asyncio.run_coroutine_threadsafe(self._aws.run(operation), self._loop).result()
