"""Predicted cost of joining."""

from __future__ import annotations

import pytest

from bench.cloud.join import Assumed, join, row, segments_of
from tidemill.batch.parts import MIN_COPIED_BYTES, SEGMENT_BYTES


@pytest.mark.parametrize("row_bytes", [400, 1000, 30_000])
def test_segments_are_all_rows(row_bytes: int) -> None:
    """Whatever the shards, and none is larger than a worker's."""
    sizes, num_shards = segments_of(1_000_003, 1000, row_bytes)
    assert sum(sizes) == 1_000_003 * row_bytes
    assert len(sizes) >= num_shards
    assert max(sizes) < SEGMENT_BYTES + MIN_COPIED_BYTES


def test_large_files_are_copied_and_small_ones_sent() -> None:
    """At the current limit, 10⁷ lines go through the Lambda, but less than a hundredth of 10⁸."""
    small, large = (join(*segments_of(lines, 1000, 1000), Assumed()) for lines in (10**7, 10**8))
    assert small.sent_bytes == pytest.approx(10**10, rel=0.01)
    assert large.sent_bytes < 10**9
    assert large.copied_bytes + large.sent_bytes == 10**11
    assert large.seconds < small.seconds
    assert small.num_groups == large.num_groups == 0


def test_a_row_of_the_table_contains_both_levels() -> None:
    """Bytes are copied twice where one upload has no room."""
    sizes, num_shards = segments_of(2 * 10**8, 1000, 1000)
    done = join(sizes, num_shards, Assumed())
    assert done.num_groups > 300
    assert done.copied_bytes + done.sent_bytes == 2 * sum(sizes)
    assert f"| {done.num_groups:,} |" in row(2 * 10**8, 1000, 1000, Assumed())
