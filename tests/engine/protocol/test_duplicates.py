"""Repeated custom ids in files that do not fit in memory."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.duplicates import Duplicate, DuplicateFinder, Duplicates


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
