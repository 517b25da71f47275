"""How a batch stands: what its finished shards came to, and the shards that were begun.

A shard is live from its first claim to its commit. To look at a batch takes as long as it has live
shards, however many there are beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.batchfile.pace import Rates
from handler.batch.model import Progress, sum_of


@dataclass(frozen=True, slots=True)
class Live:
    """A shard that was begun and is not done; nobody has it once `lease_until` has passed.

    No worker runs one any more that is given up.
    """

    number: int
    fence: int
    attempts: int
    lease_until: float
    progress: Progress
    is_given_up: bool = False

    def is_leased(self, now: float) -> bool:
        """Say whether somebody has the right to run it."""
        return self.lease_until >= now


@dataclass(frozen=True, slots=True)
class Standing:
    """How the shards of a batch stand: `num_done` are done, and came to `done`."""

    num_done: int
    done: Progress
    live: tuple[Live, ...]

    def leased(self, now: float) -> list[Live]:
        """Return the shards that somebody has the right to run."""
        return [shard for shard in self.live if shard.is_leased(now)]

    def progress(self, now: float) -> Progress:
        """Return the sum over all shards: its counts never fall while a batch runs.

        Rates are summed over those shards that somebody has the right to run.
        """
        counts = self.done + sum_of(shard.progress for shard in self.live)
        running = sum_of(shard.progress for shard in self.leased(now))
        return replace(counts, **{name: getattr(running, name) for name in Rates._fields})
