"""Any owners in any order against a model of what a lease is: no step lets two of them commit.

Owners that have lost their lease go on writing here as if they did not know, clocks jump, and
answers are lost so that a call is sent again. After each step the table holds what the model says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.emulators import Emulator, deployment_of
from tests.handler.aws.given import LEASE_SECONDS, NOW, in_progress
from tests.handler.aws.stores.test_table import sent_twice
from tidemill.batch.model import Shard, ShardStatus
from tidemill.batch.progress_counts import Progress, sum_of
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import ConditionFailed, LeaseLost

NUM_SHARDS = 2
NUMBERS = st.integers(0, NUM_SHARDS - 1)
# Up to the end of a lease, and just beyond it.
WAITS = st.sampled_from((0.0, LEASE_SECONDS, LEASE_SECONDS + 0.5))
PROGRESS = st.builds(Progress, st.integers(0, 10), st.integers(0, 10))
MANNERS = st.sampled_from((sent_twice, lambda operation: operation))

Manner = Callable[[Operation[Any]], Operation[Any]]


class Leases(RuleBasedStateMachine):
    """Owners of two shards of one batch; `shards` is what the table should hold."""

    claims: Bundle[Shard] = Bundle("claims")

    def __init__(self, aws: Aws, deployment: Deployment) -> None:
        super().__init__()
        self.run, self.table = aws.run, deployment.table
        self.batch = self.run(in_progress(deployment, NUM_SHARDS))
        self.batch_id = self.batch.id
        self.shards = self.run(self.table.list_shards(self.batch_id))
        self.now = float(NOW)
        self.names = count()
        self.committed: dict[int, str | None] = {}
        self.fences: set[tuple[int, int]] = set()

    @rule(target=claims, number=NUMBERS, wait=WAITS, steal=st.booleans(), manner=MANNERS)
    def claim(self, number: int, wait: float, *, steal: bool, manner: Manner) -> Any:
        """Claim under a new name: only what is pending, and free unless it is stolen."""
        self.now += wait
        shard, owner = self.shards[number], f"owner-{next(self.names)}"
        operation = self.table.claim(
            self.batch_id,
            number,
            owner=owner,
            now=self.now,
            lease_seconds=LEASE_SECONDS,
            steal=steal,
        )
        is_free = steal or shard.owner is None or shard.lease_until < self.now
        if shard.status is ShardStatus.DONE or not is_free:
            with pytest.raises(ConditionFailed):
                self.run(manner(operation))
            return multiple()
        mine = self.run(manner(operation))
        self.shards[number] = replace(
            shard,
            owner=owner,
            lease_until=self.now + LEASE_SECONDS,
            fence=shard.fence + 1,
            attempts=shard.attempts + 1,
        )
        assert mine == self.shards[number]
        assert (number, mine.fence) not in self.fences
        self.fences.add((number, mine.fence))
        return mine

    @rule(mine=claims, progress=PROGRESS, attempts=st.integers(0, 3), manner=MANNERS)
    def renew(self, mine: Shard, progress: Progress, attempts: int, manner: Manner) -> None:
        """Renew, though the lease may be over or another's by now."""
        until = self.now + LEASE_SECONDS
        operation = manner(
            self.table.renew(mine, lease_until=until, progress=progress, attempts=attempts)
        )
        if not self.is_owner(mine):
            with pytest.raises(LeaseLost):
                self.run(operation)
            return
        self.run(operation)
        self.change(mine, lease_until=until, progress=progress, attempts=attempts)

    @rule(mine=claims, progress=PROGRESS, lines=st.sets(st.integers(1, 9)), manner=MANNERS)
    def release(self, mine: Shard, progress: Progress, lines: set[int], manner: Manner) -> None:
        """Give back what may be another's by now, or given back before."""
        suspects = tuple((line,) for line in sorted(lines))
        operation = manner(
            self.table.release(
                mine, progress=progress, suspects=suspects, quarantined=(4,), attempts=0
            )
        )
        shard = self.shards[mine.number]
        if self.is_owner(mine):
            self.run(operation)
            known = {"suspects": suspects, "quarantined": (4,), "attempts": 0}
            self.change(mine, owner=None, lease_until=0.0, progress=progress, **known)
        elif self.is_last(mine) and shard.status is ShardStatus.PENDING:
            self.run(operation)
        else:
            with pytest.raises(LeaseLost):
                self.run(operation)

    @rule(mine=claims, progress=PROGRESS, sizes=st.lists(st.integers(1, 99)), manner=MANNERS)
    def commit(self, mine: Shard, progress: Progress, sizes: list[int], manner: Manner) -> None:
        """Commit, as the newest owner or as one that does not know that it is not."""
        operation = manner(
            self.table.commit(mine, progress=progress, output_sizes=sizes, error_sizes=[])
        )
        if not self.is_last(mine):
            with pytest.raises(LeaseLost):
                self.run(operation)
            return
        self.run(operation)
        assert self.committed.setdefault(mine.number, mine.owner) == mine.owner
        if self.shards[mine.number].status is ShardStatus.PENDING:
            self.change(
                mine,
                status=ShardStatus.DONE,
                owner=None,
                lease_until=0.0,
                progress=progress,
                output_sizes=tuple(sizes),
                attempts=0,
                suspects=mine.suspects,
                quarantined=mine.quarantined,
                abandoned=mine.abandoned,
            )

    @rule(number=NUMBERS, manner=MANNERS)
    def abandon(self, number: int, manner: Manner) -> None:
        """Give up the lines of a shard that was begun, whatever its owner."""
        self.run(manner(self.table.abandon(self.batch_id, number, "no more")))
        if number in self.live:
            self.change(self.shards[number], abandoned="no more")

    @invariant()
    def the_table_agrees(self) -> None:
        """Every field of every shard, the count of those left, and the sums."""
        assert self.run(self.table.list_shards(self.batch_id)) == self.shards
        assert self.run(self.table.count_left(self.batch)) == NUM_SHARDS - len(self.committed)
        standing = self.run(self.table.get_shard_progress(self.batch))
        assert standing.num_done == len(self.committed)
        assert standing.progress(self.now) == sum_of(shard.progress for shard in self.shards)
        assert {live.number for live in standing.live} == self.live

    @property
    def live(self) -> set[int]:
        """Return the shards that were begun and are not done."""
        pending = (each for each in self.shards if each.status is ShardStatus.PENDING)
        return {shard.number for shard in pending if shard.fence}

    def is_last(self, mine: Shard) -> bool:
        """Return whether the shard has not been claimed since."""
        return self.shards[mine.number].fence == mine.fence

    def is_owner(self, mine: Shard) -> bool:
        """Return whether the shard is still the owner's, if only for lack of another claim."""
        shard = self.shards[mine.number]
        is_pending = shard.status is ShardStatus.PENDING
        return is_pending and self.is_last(mine) and shard.owner == mine.owner

    def change(self, mine: Shard, **fields: Any) -> None:
        """Note what the table should hold from now on."""
        self.shards[mine.number] = replace(self.shards[mine.number], **fields)


def test_one_owner_commits_a_shard_whatever_the_others_do(ministack: Emulator) -> None:
    """Over many seeded histories; on one emulator, the conditions by themselves are on each.

    A step makes several calls, so there are fewer histories than the profile's cases.
    """
    aws, deployment = Aws(ministack.client), deployment_of(ministack.create())
    run_state_machine_as_test(
        lambda: Leases(aws, deployment),
        settings=settings(
            max_examples=settings().max_examples * 2 // 5,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
