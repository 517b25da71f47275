"""Progress of a batch: the sum over its finished shards, and its live shards.

A shard is live from its first claim to its commit. Reading a batch's progress takes time in
proportion to its live shards, not to all shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from .file.throughput import Rates
from .model import Batch
from .progress_counts import Progress, sum_of


@dataclass(frozen=True, slots=True)
class LiveShard:
    """A shard that has started and is not done; it has no owner once `lease_until` has passed.

    No worker runs a shard that was given up.
    """

    number: int
    fence: int
    attempts: int
    lease_until: float
    progress: Progress
    is_given_up: bool = False
    is_escalated: bool = False

    @property
    def has_escalated_rows(self) -> bool:
        """Return whether the second model of a cascade has rows to decide, or decides them."""
        return self.is_escalated and self.progress.escalated > 0

    def is_leased(self, now: float) -> bool:
        """Say whether a worker holds its lease."""
        return self.lease_until >= now


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Shard progress of a batch: `num_done` shards are done, `done` is the sum over them."""

    num_done: int
    done: Progress
    live: tuple[LiveShard, ...]

    def leased(self, now: float) -> list[LiveShard]:
        """Return the shards whose lease a worker holds."""
        return [shard for shard in self.live if shard.is_leased(now)]

    def are_decided(self, num_shards: int) -> bool:
        """Return whether the first model of a cascade has nothing left to do in its shards."""
        decided = sum(shard.is_escalated or shard.is_given_up for shard in self.live)
        return self.num_done + decided >= num_shards

    def to_close(self, batch: Batch) -> list[LiveShard]:
        """Return the shards that no worker will run: given up, or without rows to be escalated.

        None before the threshold is learnt, which decides which of their drafts are final.
        """
        if batch.awaits_threshold:
            return []
        return [
            shard
            for shard in self.live
            if shard.is_given_up or (shard.is_escalated and not shard.has_escalated_rows)
        ]

    def failing(self, now: float, max_attempts: int) -> list[LiveShard]:
        """Return the shards that were given up, or have no owner after this number of claims."""
        return [
            shard
            for shard in self.live
            if not shard.is_leased(now) and (shard.is_given_up or shard.attempts >= max_attempts)
        ]

    def progress(self, now: float) -> Progress:
        """Return the sum over all shards; its counts never decrease while a batch runs.

        Rates are summed over the shards whose lease a worker holds.
        """
        counts = self.done + sum_of(shard.progress for shard in self.live)
        running = sum_of(shard.progress for shard in self.leased(now))
        return replace(counts, **{name: getattr(running, name) for name in Rates._fields})


YOUNG_SECONDS: Final = 6 * 3600
_FINE_SECONDS, _COARSE_SECONDS = 60, 900


@dataclass(frozen=True, slots=True)
class HistoryBucket:
    """Rows that became durable from `start` (Unix seconds) on; `tokens` counts generated ones."""

    start: int
    seconds: int
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    input_tokens: int = 0
    audio_seconds: float = 0.0

    @classmethod
    def of(cls, start: int, seconds: int, gained: Progress) -> HistoryBucket:
        """Return a bucket with this progress."""
        return cls(
            start,
            seconds,
            gained.completed,
            gained.failed,
            gained.completion_tokens,
            gained.prompt_tokens,
            round(gained.audio_seconds, 3),
        )


def history_bucket(batch: Batch, now: float) -> tuple[int, int]:
    """Return the start and the length in seconds of the current history bucket."""
    is_young = now < (batch.in_progress_at or batch.created_at) + YOUNG_SECONDS
    seconds = _FINE_SECONDS if is_young else _COARSE_SECONDS
    return int(now) // seconds * seconds, seconds
