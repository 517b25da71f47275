"""What a look at a batch costs: its reads do not grow with the shards that are done."""

from __future__ import annotations

import pytest

from bench.look import look
from handler.batch.model import Progress


@pytest.mark.parametrize("num_live", [0, 100, 2000])
def test_a_look_at_many_shards_is_two_reads(num_live: int) -> None:
    """Everything that is live is found, in answers that have room for all of it."""
    found = look(244_144, num_live, rounds=1)
    assert found.num_reads <= 5
    assert found.num_bytes < 2**20
    assert len(found.standing.live) == num_live
    assert found.standing.num_done == (244_144 - num_live) // 8 * 8
    assert {shard.progress != Progress() for shard in found.standing.live} <= {True}
