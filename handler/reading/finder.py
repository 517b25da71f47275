"""Where the rows of a shard stand: its parts are listed, and the head of each is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from handler.aws.calls import Operation
from handler.aws.sync import Aws
from handler.batch.keys import fill_key, part_prefix, shard_prefix
from handler.batch.model import Batch, Shard, ShardStatus
from handler.deployment import Deployment
from handler.errors import BadPart, HandlerError, NotThere
from handler.log import logger
from handler.reading.part_cache import PartCache, PartRows, Place

# What one answer may read: an API has half a minute, and a small share of a processor.
MAX_HEADS: Final = 512


class WorkGone(HandlerError):
    """What the batch was made of is no longer kept: its rows are in its files only."""

    code = "work_deleted"


class NotIndexed(HandlerError):
    """More parts than one answer may look at; they are remembered, so that the next goes on."""

    code = "not_indexed"


@dataclass(slots=True)
class Finder:
    """Finds the rows of one batch for one answer, within what that may read."""

    aws: Aws
    deployment: Deployment
    batch: Batch
    cache: PartCache
    heads_left: int = MAX_HEADS
    _keys: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def list_parts(self, shards: Sequence[Shard]) -> None:
        """Find out, at once, which parts these shards have."""
        unknown = []
        for shard in shards:
            known = self.cache.keys(_name(shard))
            if known is None:
                unknown.append(shard)
            else:
                self._keys[shard.number] = known
        bucket, batch_id = self.deployment.bucket, self.batch.id
        listed = self.aws.run_all(
            bucket.list_keys(shard_prefix(batch_id, shard.number)) for shard in unknown
        )
        for shard, keys in zip(unknown, listed, strict=True):
            self._keys[shard.number] = _parts_among(keys, shard)
            if shard.status is ShardStatus.DONE:
                self.cache.put_keys(_name(shard), self._keys[shard.number])

    def find(self, shard: Shard) -> dict[int, tuple[str, Place]]:
        """Return part and place of each row of a shard that was listed, by its line.

        Raises NotIndexed, and WorkGone when rows that were sealed are not there.
        """
        keys = self._keys[shard.number]
        self._read_heads([key for key in keys if self.cache.part(key) is None])
        found: dict[int, tuple[str, Place]] = {}
        for key in keys:
            for place in self.cache.part(key) or ():
                found.setdefault(place.line, (key, place))
        if shard.status is ShardStatus.DONE and len(found) < shard.progress.num_rows:
            raise WorkGone(f"parts of shard {shard.number} of {self.batch.id}")
        return found

    def _read_heads(self, keys: Sequence[str]) -> None:
        some = keys[: self.heads_left]
        self.heads_left -= len(some)
        read = self.aws.run_all(self._read_head(key) for key in some)
        for key, rows in zip(some, read, strict=True):
            self.cache.put_part(key, rows)
        if len(some) < len(keys):
            raise NotIndexed(f"{len(keys) - len(some)} parts of {self.batch.id}")

    def _read_head(self, key: str) -> Operation[PartRows]:
        """Return the rows of a part; none when it cannot be read, or was deleted meanwhile."""
        try:
            return PartRows.of((yield from self.deployment.bucket.read_head(key)))
        except (BadPart, NotThere) as exc:
            logger.error("part left out", batch_id=self.batch.id, key=key, reason=str(exc))
        return PartRows.of(())


def _name(shard: Shard) -> str:
    """Return what tells a shard from others, and from itself under another owner."""
    return fill_key(shard.batch_id, shard.number, shard.fence)


def _parts_among(keys: Sequence[str], shard: Shard) -> tuple[str, ...]:
    """Return the parts in their order, and behind them what finalize has filled in."""
    prefix = part_prefix(shard.batch_id, shard.number)
    parts = sorted(key for key in keys if key.startswith(prefix))
    fill = fill_key(shard.batch_id, shard.number, shard.fence)
    is_filled = shard.status is ShardStatus.DONE and fill in keys
    return (*parts, fill) if is_filled else tuple(parts)
