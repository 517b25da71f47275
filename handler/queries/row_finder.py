"""Finds the rows of a shard: in the segments of its commit, or before that in its parts.

The parts of a running shard are listed, and the header of each is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from tidemill.batch.errors import BadPart, HandlerError
from tidemill.batch.model import Batch, Shard, ShardStatus
from tidemill.batch.object_keys import part_prefix
from tidemill.batch.parts import RowKind
from tidemill.batch.result_kinds import ERRORS, KINDS, OUTPUT, ResultKind, has_merged_rows
from tidemill.batch.results_object import GONE_CODE

from ..aws.calls import Operation
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..observability import logger
from .part_cache import PartCache, PartRows, Place

# Limits of one reply: an API Lambda has half a minute, and a small share of a vCPU.
MAX_HEADS: Final = 512
_ALL_KINDS: Final = frozenset(RowKind)


class WorkGone(HandlerError):
    """Parts and segments were deleted: only the batch's files contain the rows."""

    code = GONE_CODE


class NotIndexed(HandlerError):
    """More parts than one reply may read; they are cached, so that the next reply continues."""

    code = "not_indexed"


@dataclass(slots=True)
class RowFinder:
    """Finds the rows of one batch for one reply, within its limits.

    Raises WorkGone for a batch whose rows were merged with those of a retry.
    """

    aws: Aws
    deployment: Deployment
    batch: Batch
    cache: PartCache
    heads_left: int = MAX_HEADS
    _keys: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if has_merged_rows(self.batch):
            raise WorkGone(f"rows of {self.batch.id} from before its retry")

    def list_objects(self, shards: Sequence[Shard]) -> None:
        """List the objects that contain the rows of these shards, concurrently."""
        running = []
        for shard in shards:
            if shard.status is ShardStatus.DONE:
                self._keys[shard.number] = [key for kind in KINDS for key in _segments(kind, shard)]
            else:
                running.append(shard)
        bucket, batch_id = self.deployment.bucket, self.batch.id
        listed = self.aws.run_all(
            bucket.list_keys(part_prefix(batch_id, shard.number)) for shard in running
        )
        for shard, keys in zip(running, listed, strict=True):
            # The owner's rows first: an older owner's late part may contain such a line too.
            self._keys[shard.number] = sorted(keys, reverse=True)

    def load(self, shards: Sequence[Shard]) -> None:
        """List the objects of these shards and read their indexes concurrently, as far as possible.

        Raises WorkGone if sealed rows are missing.
        """
        self.list_objects(shards)
        unknown = [shard for shard in shards if self._unknown(shard)]
        sealed = [shard for shard in unknown if shard.status is ShardStatus.DONE]
        running = [shard for shard in unknown if shard.status is not ShardStatus.DONE]
        with suppress(NotIndexed):
            self._read_seals(sealed)
            self._read_heads([key for shard in running for key in self._unknown(shard)])

    def _unknown(self, shard: Shard) -> list[str]:
        """Return the objects of a listed shard whose rows are unknown."""
        return [key for key in self._keys[shard.number] if self.cache.part(key) is None]

    def find(
        self, shard: Shard, kinds: Collection[RowKind] = _ALL_KINDS
    ) -> dict[int, tuple[str, Place]]:
        """Return object and place of each row of a listed shard, by its line.

        Rows of other kinds are left out. Raises NotIndexed, and WorkGone if sealed rows are
        missing.
        """
        keys = self._keys[shard.number]
        unknown = self._unknown(shard)
        if unknown and shard.status is ShardStatus.DONE:
            self._read_seals([shard])
        else:
            self._read_heads(unknown)
        found: dict[int, tuple[str, Place]] = {}
        for key in keys:
            part = self.cache.part(key)
            if part is None:
                continue
            if shard.status is ShardStatus.DONE and kinds != _ALL_KINDS:
                found |= {place.line: (key, place) for place in part.of_kinds(kinds)}
                continue
            for place in part:
                found.setdefault(place.line, (key, place))
        if kinds == _ALL_KINDS:
            return found
        return {line: row for line, row in found.items() if row[1].kind in kinds}

    def _read_seals(self, shards: Sequence[Shard]) -> None:
        some = shards[: self.heads_left]
        self.heads_left -= len(some)
        try:
            seals = self.aws.run_all(map(self.deployment.bucket.read_seal, some))
        except (BadPart, NotThere) as exc:
            raise WorkGone(f"sealed rows of {self.batch.id}") from exc
        for shard, seal in zip(some, seals, strict=True):
            truncated = frozenset(seal.truncated or ())
            success = RowKind.SUCCESS if seal.truncated is None else RowKind.WHOLE
            for key, rows in zip(_segments(OUTPUT, shard), seal.output, strict=True):
                self.cache.put_part(key, PartRows.from_segment(rows, success, truncated))
            for key, rows in zip(_segments(ERRORS, shard), seal.errors, strict=True):
                self.cache.put_part(key, PartRows.from_segment(rows, RowKind.FAILED))
        if len(some) < len(shards):
            raise NotIndexed(f"{len(shards) - len(some)} shards of {self.batch.id}")

    def _read_heads(self, keys: Sequence[str]) -> None:
        some = keys[: self.heads_left]
        self.heads_left -= len(some)
        read = self.aws.run_all(self._read_head(key) for key in some)
        for key, rows in zip(some, read, strict=True):
            self.cache.put_part(key, rows)
        if len(some) < len(keys):
            raise NotIndexed(f"{len(keys) - len(some)} parts of {self.batch.id}")

    def _read_head(self, key: str) -> Operation[PartRows]:
        """Return the rows of a part; none if it is unreadable, or was deleted in the meantime."""
        try:
            return PartRows.from_part((yield from self.deployment.bucket.read_head(key)))
        except (BadPart, NotThere) as exc:
            logger.error("part unreadable", batch_id=self.batch.id, key=key, reason=str(exc))
        return PartRows.from_part(())


def _segments(kind: ResultKind, shard: Shard) -> list[str]:
    return [segment.key for segment in kind.segments_of(shard)]
