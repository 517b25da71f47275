"""Segments into the parts of uploads, of one or of two levels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.parts import MAX_PARTS
from tidemill.handler.aws.objects.upload_plan import (
    S3_LIMITS,
    UploadLimits,
    UploadPart,
    plan_groups,
    plan_upload,
)

MIB = 2**20
MIN = S3_LIMITS.min_part_bytes
MAX_PART_BYTES = 5 * 2**30
SIZES = st.lists(
    st.one_of(
        st.integers(1, 40 * MIB),
        st.sampled_from((1, MIN - 1, MIN, MIN + 1, 2 * MIN - 1, 2 * MIN, 16 * MIB)),
    ),
    max_size=60,
)
SMALL = UploadLimits(min_part_bytes=10, max_parts=6, group_bytes=60)


def check(
    sizes: Sequence[int], limits: UploadLimits = S3_LIMITS, most_sent: int = 3 * MIN
) -> list[UploadPart]:
    """Assert that the parts meet S3's rules, and are the segments' bytes in their order."""
    plan = list(plan_upload(sizes, limits))
    assert [part.number for part in plan] == list(range(1, len(plan) + 1))
    pieces = [piece for part in plan for piece in part.pieces]
    for piece, after in pairwise(pieces):
        is_next = piece.end == sizes[piece.segment] and (after.segment, after.start) == (
            piece.segment + 1,
            0,
        )
        is_rest = (after.segment, after.start) == (piece.segment, piece.end)
        assert is_next or is_rest
    assert all(piece.start < piece.end for piece in pieces)
    assert sum(part.num_bytes for part in plan) == sum(sizes)
    assert all(part.num_bytes >= limits.min_part_bytes for part in plan[:-1])
    assert all(part.num_bytes < most_sent for part in plan if not part.is_copy)
    return plan


@given(SIZES)
def test_parts_are_the_segments_in_order_and_large_enough(sizes: list[int]) -> None:
    """Every byte is in one part, in order, and no part but the last is below S3's minimum."""
    check(sizes)


@given(SIZES)
def test_what_s3_can_copy_is_not_sent(sizes: list[int]) -> None:
    """Sent are small segments alone, and of a neighbour what a part needs or is left too small."""
    for part in plan_upload(sizes):
        if part.is_copy:
            continue
        large = [piece for piece in part.pieces if sizes[piece.segment] >= MIN]
        assert len(large) <= 1
        for piece in large:
            assert part.num_bytes == MIN or sizes[piece.segment] < 2 * MIN


def test_large_segments_are_copied_inside_s3() -> None:
    """A segment is copied whole if no small one precedes it, else without the borrowed bytes."""
    plan = plan_upload([16 * MIB, 17 * MIB, 3 * MIB, 16 * MIB, 6 * MIB, 4 * MIB, 9 * MIB, 1])
    assert [[tuple(piece) for piece in part.pieces] for part in plan] == [
        [(0, 0, 16 * MIB)],
        [(1, 0, 17 * MIB)],
        [(2, 0, 3 * MIB), (3, 0, 2 * MIB)],
        [(3, 2 * MIB, 16 * MIB)],
        [(4, 0, 6 * MIB)],
        [(5, 0, 4 * MIB), (6, 0, MIB)],
        [(6, MIB, 9 * MIB)],
        [(7, 0, 1)],
    ]


def test_nothing_makes_no_parts() -> None:
    """No segments, no parts."""
    assert list(plan_upload([])) == []
    assert list(plan_groups([])) == []


def test_what_one_upload_has_room_for_makes_no_groups() -> None:
    """The second level is for what has more parts than S3 takes."""
    assert list(plan_groups([16 * MIB] * MAX_PARTS)) == []
    assert list(plan_groups([16 * MIB] * (MAX_PARTS + 1))) != []


def check_groups(sizes: Sequence[int], limits: UploadLimits = S3_LIMITS) -> list[UploadPart]:
    """Assert that groups are the segments in order, and parts of one upload; return their parts."""
    groups = list(plan_groups(sizes, limits))
    if not groups:
        return check(sizes, limits)
    assert [groups[0].first, *(group.end for group in groups)] == [
        *(group.first for group in groups),
        len(sizes),
    ]
    assert all(group.num_bytes == sum(sizes[group.first : group.end]) for group in groups)
    assert [group.start for group in groups] == [
        sum(group.num_bytes for group in groups[:number]) for number in range(len(groups))
    ]
    whole = check([group.num_bytes for group in groups], limits)
    assert all(part.is_copy for part in whole)
    assert len(whole) == len(groups) <= limits.max_parts
    parts = [check(sizes[group.first : group.end], limits) for group in groups]
    assert all(len(each) <= limits.max_parts for each in parts)
    return [part for each in parts for part in each]


@given(st.lists(st.integers(1, 30), max_size=35))
def test_groups_are_the_segments_in_order_and_few_enough(sizes: list[int]) -> None:
    """Small limits are used: every group is a part, and none has too many."""
    groups = list(plan_groups(sizes, SMALL))
    assert sum(group.num_bytes for group in groups) == (sum(sizes) if groups else 0)
    assert len(groups) <= SMALL.max_parts
    assert all(group.num_bytes >= SMALL.min_part_bytes for group in groups[:-1])
    assert [size for group in groups for size in sizes[group.first : group.end]] == (
        sizes if groups else []
    )


@pytest.mark.parametrize(
    ("sizes", "max_mib_sent"),
    [
        pytest.param([3 * MIB] * 25_000, 75_000, id="all-small", marks=pytest.mark.long),
        pytest.param([16 * MIB] * 61_036, 0, id="a-billion-lines"),
        pytest.param([80 * MIB] * 60_000, 0, id="five-terabytes", marks=pytest.mark.long),
        # A range of the input ends in a shard that is small: it ends a group.
        pytest.param(([16 * MIB] * 16 + [3 * MIB]) * 1200, 0, id="an-edge-a-range"),
        pytest.param([MIN, 17 * MIB] * 100_000, 0, id="just-enough", marks=pytest.mark.long),
    ],
)
def test_results_of_any_size_become_one_object(sizes: list[int], max_mib_sent: int) -> None:
    """Terabytes in a hundred thousands of segments make at most 10,000 parts twice."""
    parts = check_groups(sizes)
    sent = sum(part.num_bytes for part in parts if not part.is_copy)
    assert sent <= max_mib_sent * MIB
    groups = list(plan_groups(sizes))
    assert max(group.num_bytes for group in groups) <= MAX_PART_BYTES
