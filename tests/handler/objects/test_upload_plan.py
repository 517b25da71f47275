"""Segments into the parts of a multipart upload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.objects.upload_plan import MAX_PARTS, MIN_PART_BYTES, plan_upload

MIB = 2**20
SIZES = st.lists(
    st.one_of(
        st.integers(1, 40 * MIB),
        st.sampled_from((1, MIN_PART_BYTES - 1, MIN_PART_BYTES, 8 * MIB - 1, 8 * MIB, 16 * MIB)),
    ),
    max_size=60,
)


def check(sizes: list[int]) -> None:
    """Assert what S3 asks of parts, and that they are the segments in their order."""
    plan = plan_upload(sizes)
    assert [part.number for part in plan] == list(range(1, len(plan) + 1))
    assert [index for part in plan for index in range(part.first, part.end)] == [*range(len(sizes))]
    assert all(part.num_bytes == sum(sizes[part.first : part.end]) for part in plan)
    assert all(part.num_bytes >= MIN_PART_BYTES for part in plan[:-1])
    assert len(plan) <= MAX_PARTS


@given(SIZES)
def test_parts_are_the_segments_in_order_and_large_enough(sizes: list[int]) -> None:
    """Every segment is in one part, in order, and no part but the last is below S3's minimum."""
    check(sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 50_000,
        [300 * 1024] * 250_000,
        [16 * MIB] * 300_000,
        # Each small one is a part of its own, because a copy follows it.
        [5 * MIB, 17 * MIB] * 100_000,
        [5 * MIB, 20 * MIB] * 8_000,
    ],
)
def test_results_of_any_size_fit_into_the_parts_that_s3_takes(sizes: list[int]) -> None:
    """Terabytes and a million small segments alike make at most 10,000 parts."""
    check(sizes)


def test_large_segments_are_copied_inside_s3() -> None:
    """Whole segments are copied; a small one before them joins only where it must."""
    plan = plan_upload([16 * MIB, 17 * MIB, 3 * MIB, 16 * MIB, 6 * MIB, 16 * MIB, 1])
    assert [(part.first, part.end, part.is_copy) for part in plan] == [
        (0, 1, True),
        (1, 2, True),
        (2, 4, False),
        (4, 5, True),
        (5, 6, True),
        (6, 7, True),
    ]


def test_nothing_makes_no_parts() -> None:
    """No segments, no parts."""
    assert plan_upload([]) == ()
