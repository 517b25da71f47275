"""Repeated custom IDs in files that do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.duplicate_ids import (
    RECORD_BYTES,
    Duplicate,
    DuplicateFinder,
    Duplicates,
    Share,
    count_shares,
    find_repeated,
)


@given(st.lists(st.sampled_from(["", "a", "b", "é", "\ud800", "a\0"])))
def test_each_repeat_is_reported_with_the_first_line(ids: list[str]) -> None:
    """Count and lines agree with a dictionary of all ids."""
    first_lines: dict[str, int] = {}
    expected = []
    with DuplicateFinder() as finder:
        for line, custom_id in enumerate(ids, start=1):
            finder.add(custom_id, line)
            first = first_lines.setdefault(custom_id, line)
            if first != line:
                expected.append(Duplicate(line, first))
        assert finder.find(limit=4) == Duplicates(len(expected), tuple(expected[:4]))


def test_ids_beyond_memory_go_to_a_file_that_goes_away(tmp_path: Path) -> None:
    """200,000 IDs, each 1,000th repeated far away, are found; no file is left in the folder."""
    with DuplicateFinder(tmp_path) as finder:
        for line in range(1, 200_001):
            finder.add(f"id-{line}", line)
        for line in range(1_000, 200_001, 1_000):
            finder.add(f"id-{line}", 200_000 + line)
        assert finder._num_blocks > 500
        found = finder.find(limit=2)
        assert found == finder.find(limit=2)
    assert found.count == 200
    assert found.first == (Duplicate(201_000, 1_000), Duplicate(202_000, 2_000))
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_one_repeated_id_keeps_only_what_it_names() -> None:
    """All lines except the first are counted, and the first few are listed."""
    with DuplicateFinder() as finder:
        for line in range(1, 10_001):
            finder.add("same", line)
        assert finder.find(limit=2) == Duplicates(9_999, (Duplicate(2, 1), Duplicate(3, 1)))


def saved_by(ids: Iterable[tuple[str, int]]) -> list[bytes]:
    """Return the saved bytes of these IDs and lines, partition by partition."""
    with DuplicateFinder() as finder:
        for custom_id, line in ids:
            finder.add(custom_id, line)
        stream = BytesIO()
        counts = finder.save(stream)
    stream.seek(0)
    return [stream.read(count * RECORD_BYTES) for count in counts]


def search(
    saved: Sequence[list[bytes]], shifts: Sequence[int], num_shares: int, limit: int = 100
) -> Duplicates:
    """Search the saved IDs of several finders share by share."""
    found = Duplicates()
    for number in range(num_shares):
        share, of_share = Share.nth(number, num_shares), Duplicates()
        for partition in range(share.first, share.end):
            pieces = zip((data[partition] for data in saved), shifts, strict=True)
            repeated = find_repeated(pieces, share.slice_number, share.num_slices)
            of_share = of_share.plus(repeated, limit)
        found = found.merged(of_share, limit)
    return found


@given(
    st.lists(st.sampled_from([*"abcdefgh", "é", "\ud800"]), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
    st.sampled_from([1, 2, 32, 256, 512, 1024]),
)
def test_saved_ids_give_the_same_repeats(ids: list[str], cuts: list[int], num_shares: int) -> None:
    """IDs of several finders repeat as in a single one, whatever the shares."""
    numbered = list(zip(ids, range(1, 100), strict=False))
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    saved = [saved_by(zip(ids[start:end], count(2))) for start, end in pairwise(places)]
    shifts = [start - 1 for start in places[:-1]]
    with DuplicateFinder() as whole:
        for custom_id, line in numbered:
            whole.add(custom_id, line)
        assert search(saved, shifts, num_shares) == whole.find()
        assert search(saved, shifts, num_shares, limit=2) == whole.find(limit=2)


def test_shares_divide_all_ids_among_them() -> None:
    """Each ID is in one share, whether it is some partitions or a slice of one."""
    ids = [(f"id-{line}", line) for line in range(1, 20_001)]
    for num_shares in (1, 4, 256, 1024):
        again = [(name, line + 20_000) for name, line in ids]
        assert search([saved_by(ids), saved_by(again)], [0, 0], num_shares).count == 20_000


@pytest.mark.parametrize(
    ("num_ids", "num_shares"),
    [(0, 1), (2**22, 1), (2**22 + 1, 2), (268_000_000, 64), (10**9, 256), (10**10, 4096)],
)
def test_no_share_is_too_large_for_memory(num_ids: int, num_shares: int) -> None:
    """A share has four million IDs at most, on average, for any total."""
    assert count_shares(num_ids) == num_shares
    assert num_ids / num_shares <= 2**22


def test_a_search_can_be_left_at_any_partition() -> None:
    """A checkpoint is called before each partition."""
    with DuplicateFinder() as finder:
        finder.add("a", 1)
        looks = iter(range(100))
        with pytest.raises(StopIteration):
            finder.find(look=lambda: next(looks))
        assert finder.find() == Duplicates()
