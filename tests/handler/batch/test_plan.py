"""Cutting: every byte and every line in one shard, whatever the lines are like."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from handler.batch.model import Shard
from handler.batch.plan import ShardCutter, ShardLimits

LENGTHS = st.lists(st.integers(1, 50), max_size=60)
LIMITS = st.builds(ShardLimits, st.integers(1, 9), st.integers(1, 120))


def cut(lengths: list[int], limits: ShardLimits, stop_after: int | None = None) -> list[Shard]:
    """Return the shards of lines of these lengths; at `stop_after` another run goes on."""
    cutter = ShardCutter("batch_1", limits)
    shards, position = [], 0
    for number, length in enumerate(lengths, start=1):
        shards.append(cutter.add(number, position, position + length))
        position += length
        if number == stop_after:
            cutter = ShardCutter(**asdict(cutter) | {"limits": limits})
    shards.append(cutter.finish(position))
    return [shard for shard in shards if shard is not None]


@given(LENGTHS, LIMITS)
def test_shards_cover_the_file(lengths: list[int], limits: ShardLimits) -> None:
    """Without a gap, without an overlap, and numbered from 0."""
    shards = cut(lengths, limits)
    assert [shard.number for shard in shards] == list(range(len(shards)))
    edges = [0, *(shard.end for shard in shards)]
    assert [shard.start for shard in shards] == edges[:-1]
    assert edges[-1] == sum(lengths)
    lines = [shard.first_line + n for shard in shards for n in range(shard.num_rows)]
    assert lines == list(range(1, len(lengths) + 1))


@given(LENGTHS, LIMITS)
def test_shards_keep_their_limits(lengths: list[int], limits: ShardLimits) -> None:
    """Lines and bytes; only a line that is too long alone passes, alone."""
    for shard in cut(lengths, limits):
        assert 1 <= shard.num_rows <= limits.max_lines
        assert shard.end - shard.start <= limits.max_bytes or shard.num_rows == 1


@given(LENGTHS, LIMITS, st.integers(1, 60))
def test_another_run_cuts_as_the_first_would_have(
    lengths: list[int], limits: ShardLimits, stop_after: int
) -> None:
    """The cutter's fields are all that it knows."""
    assert cut(lengths, limits, stop_after) == cut(lengths, limits)
