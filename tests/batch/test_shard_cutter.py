"""Cutting: every byte and every line is in one shard, whatever the lines are."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.model import Shard
from tidemill.batch.shard_cutter import ShardCutter, ShardLimits

LENGTHS = st.lists(st.integers(1, 50), max_size=60)
LIMITS = st.builds(ShardLimits, st.integers(1, 9), st.integers(1, 120))


def cut(lengths: list[int], limits: ShardLimits, stop_after: int | None = None) -> list[Shard]:
    """Return the shards of lines of these lengths; at `stop_after` another run continues."""
    cutter = ShardCutter("batch_1", limits)
    shards, position = [], 0
    for number, length in enumerate(lengths, start=1):
        shards.append(cutter.add(number, position, position + length))
        position += length
        if number == stop_after:
            cutter = ShardCutter(**asdict(cutter) | {"limits": limits})
    shards.append(cutter.finish())
    return [shard for shard in shards if shard is not None]


@given(LENGTHS, LIMITS)
def test_shards_cover_the_file(lengths: list[int], limits: ShardLimits) -> None:
    """There are no gaps and no overlaps, and numbers start at 0."""
    shards = cut(lengths, limits)
    assert [shard.number for shard in shards] == list(range(len(shards)))
    edges = [0, *(shard.end for shard in shards)]
    assert [shard.start for shard in shards] == edges[:-1]
    assert edges[-1] == sum(lengths)
    lines = [shard.first_line + n for shard in shards for n in range(shard.num_rows)]
    assert lines == list(range(1, len(lengths) + 1))


@given(LENGTHS, LIMITS)
def test_shards_observe_their_limits(lengths: list[int], limits: ShardLimits) -> None:
    """Both lines and bytes are limited; only a single long line may exceed the limit."""
    for shard in cut(lengths, limits):
        assert 1 <= shard.num_rows <= limits.max_lines
        assert shard.end - shard.start <= limits.max_bytes or shard.num_rows == 1


def test_a_large_file_has_longer_shards() -> None:
    """Small ones keep theirs; for 10⁹ lines of 1 kB a shard's rows fill a segment."""
    limits = ShardLimits()
    of_gib = {gib: limits.for_file(gib * 2**30) for gib in (0, 1, 16, 32, 64, 931)}
    assert [of.max_lines for of in of_gib.values()] == [4096, 4096, 4096, 8192, 16_384, 16_384]
    assert {of.max_bytes for of in of_gib.values()} == {limits.max_bytes}
    for gib, of in of_gib.items():
        assert gib < 16 or gib * 2**30 / min(of.max_bytes, of.max_lines * 1000) > 4000


@given(LENGTHS, LIMITS, st.integers(1, 60))
def test_another_run_cuts_in_the_same_places(
    lengths: list[int], limits: ShardLimits, stop_after: int
) -> None:
    """The cutter's fields are its whole state."""
    assert cut(lengths, limits, stop_after) == cut(lengths, limits)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40), st.integers(1, 50)), max_size=30),
    LIMITS,
)
def test_blank_lines_do_not_lengthen_a_shard(
    lines: list[tuple[int, int, int]], limits: ShardLimits
) -> None:
    """Any number may precede, separate or follow requests; every request is in one shard."""
    cutter = ShardCutter("batch_1", limits)
    shards, line, position = [], 0, 0
    places = []
    for num_blank, blank_bytes, length in lines:
        line, position = line + num_blank + 1, position + blank_bytes
        places.append((line, position, position + length))
        shards.append(cutter.add(*places[-1]))
        position += length
    shards.append(cutter.finish())
    made = [shard for shard in shards if shard is not None]
    assert sum(shard.num_rows for shard in made) == len(lines)
    for shard in made:
        inside = [place for place in places if shard.start <= place[1] and place[2] <= shard.end]
        assert len(inside) == shard.num_rows
        assert (inside[0][0], inside[0][1], inside[-1][2]) == (
            shard.first_line,
            shard.start,
            shard.end,
        )
        assert inside[-1][0] - shard.first_line < limits.max_lines
        assert shard.end - shard.start <= limits.max_bytes or shard.num_rows == 1
