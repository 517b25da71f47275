"""Sealed segments of a batch's shards: read page by page, stored compactly."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.model import BatchError, Shard
from tidemill.batch.progress_counts import Progress
from tidemill.batch.result_kinds import KINDS, ResultKind, SealedSegment

from ..aws.sync import Aws
from ..deployment import Deployment
from ..lifecycle.batch_lock import BatchLock


class SealedSegments(Sequence[SealedSegment]):
    """The segments of one kind in line order, in about twenty bytes each."""

    def __init__(self, batch_id: str, kind: ResultKind) -> None:
        self._batch_id = batch_id
        self._kind = kind
        self._shards, self._fences, self._numbers = array("I"), array("I"), array("H")
        self._sizes = array("Q")
        self.num_bytes = 0

    def add(self, shard: Shard) -> None:
        """Add the segments of the next shard."""
        for number, size in enumerate(self._kind.sizes_of(shard)):
            self._shards.append(shard.number)
            self._fences.append(shard.fence)
            self._numbers.append(number)
            self._sizes.append(size)
            self.num_bytes += size

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, index: int) -> SealedSegment: ...
    @overload
    def __getitem__(self, index: slice) -> list[SealedSegment]: ...

    def __getitem__(self, index: int | slice) -> SealedSegment | list[SealedSegment]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._kind.segment(
            self._batch_id,
            self._shards[index],
            self._fences[index],
            self._numbers[index],
            self._sizes[index],
        )


class Sealed:
    """The segments of all shards, the sums of their counts, and the reasons of abandoned ones."""

    def __init__(self, batch_id: str) -> None:
        self.segments = {kind: SealedSegments(batch_id, kind) for kind in KINDS}
        self.progress = Progress()
        self.errors: list[BatchError] = []

    def add(self, shard: Shard) -> None:
        """Add the next closed shard."""
        for segments in self.segments.values():
            segments.add(shard)
        self.progress += shard.progress.without_rates
        if shard.abandoned and len(self.errors) < MAX_LISTED_ERRORS:
            self.errors.append(BatchError("shard_failed", shard.abandoned, line=shard.first_line))


def gather(lock: BatchLock) -> Sealed:
    """Return the sealed segments and counts of the batch's closed shards."""
    sealed = Sealed(lock.batch.id)
    for shard in each_shard(lock.aws, lock.deployment, lock.batch.id, lock.check_deadline):
        sealed.add(shard)
    return sealed


def each_shard(
    aws: Aws, deployment: Deployment, batch_id: str, check: Callable[[], None]
) -> Iterator[Shard]:
    """Yield the shards of a batch in order, with a check before each page of them."""
    first: int | None = 0
    while first is not None:
        check()
        shards, first = aws.run(deployment.table.list_shards_page(batch_id, first))
        yield from shards
