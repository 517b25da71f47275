"""Repeated custom ids in files that do not fit in memory."""

from __future__ import annotations

from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batchfile.duplicates import _BLOCK_BYTES, Duplicate, DuplicateFinder, Duplicates


@given(st.lists(st.sampled_from(["", "a", "b", "é", "\ud800", "a\0"])))
def test_each_repeat_is_told_with_the_first_line(ids: list[str]) -> None:
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
    """200,000 ids, each 1,000th repeated far away, are found again; nothing stays in the folder."""
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
    """All lines but the first are counted, the first few are named."""
    with DuplicateFinder() as finder:
        for line in range(1, 10_001):
            finder.add("same", line)
        assert finder.find(limit=2) == Duplicates(9_999, (Duplicate(2, 1), Duplicate(3, 1)))


@given(
    st.lists(st.sampled_from([*"abcdefgh", "é", "\ud800"]), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_saved_ids_are_found_as_if_they_had_never_left(ids: list[str], cuts: list[int]) -> None:
    """Ids that several finders took in turn, saved and loaded in order, repeat as in one finder."""
    with DuplicateFinder() as whole, DuplicateFinder() as joined:
        for line, custom_id in enumerate(ids, start=1):
            whole.add(custom_id, line)
        places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
        for start, end in pairwise(places):
            with DuplicateFinder() as part:
                for line, custom_id in enumerate(ids[start:end], start=start + 1):
                    part.add(custom_id, line)
                saved = BytesIO()
                part.save(saved)
            saved.seek(0)
            joined.load(saved)
        assert joined.find() == whole.find()


def test_saved_ids_may_fill_blocks_that_are_begun() -> None:
    """100,000 ids in three unequal parts, some behind ids added by hand, are all there once."""
    with DuplicateFinder() as joined:
        line = 0
        for num_ids in (33_333, 50_000, 16_667):
            line += 1
            joined.add(f"by hand {line}", line)
            with DuplicateFinder() as part:
                for _ in range(num_ids):
                    line += 1
                    part.add(f"id-{line}", line)
                saved = BytesIO()
                part.save(saved)
            saved.seek(0)
            joined.load(saved)
        assert all(len(tail) < _BLOCK_BYTES for tail in joined._tails)
        assert joined.find() == Duplicates(0, ())
        joined.add("id-50000", line + 1)
        assert joined.find().first == (Duplicate(line + 1, 50_000),)


def test_saved_ids_that_are_cut_off_are_refused() -> None:
    """A file that is not complete would hide repeated ids."""
    with DuplicateFinder() as finder:
        finder.add("a", 1)
        saved = BytesIO()
        finder.save(saved)
        for data in (saved.getvalue()[:-1], b"", b"\0" * 100):
            with pytest.raises(ValueError, match="too early"):
                finder.load(BytesIO(data))
