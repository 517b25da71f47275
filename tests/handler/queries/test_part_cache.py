"""Cached parts, and the bound on their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.parts import FinishedRow, decode_index, encode_part
from tidemill.handler.queries.part_cache import PartCache, PartRows, RowKind


def part_of(*lines: int) -> PartRows:
    """Return what is remembered of a part with these lines."""
    return PartRows.from_part(
        decode_index(encode_part(FinishedRow(line, b"{}\n", is_success=True) for line in lines))
    )


@given(st.dictionaries(st.integers(1, 2**40), st.binary(min_size=1, max_size=40)))
def test_places_are_those_of_the_part(rows: dict[int, bytes]) -> None:
    """Every row is found at its place, in line order."""
    part = encode_part(FinishedRow(line, row, is_success=True) for line, row in rows.items())
    places = list(PartRows.from_part(decode_index(part)))
    assert [place.line for place in places] == sorted(rows)
    assert {place.line: part[place.start : place.end] for place in places} == rows


def test_what_was_used_last_stays() -> None:
    """The least used parts go first when there are too many rows."""
    cache = PartCache(max_rows=3 * 42)
    for name in "abc":
        cache.put_part(name, part_of(*range(1, 11)))
    assert cache.part("a") is not None
    cache.put_part("d", part_of(1))
    assert cache.part("b") is None
    assert all(cache.part(name) is not None for name in "acd")


def test_a_part_that_is_put_again_counts_once() -> None:
    """Two requests may read it at the same time."""
    cache = PartCache(max_rows=2 * 42)
    for name in "abbbb":
        cache.put_part(name, part_of(*range(1, 11)))
    assert cache.part("a") is not None


@pytest.mark.parametrize("num_lines", [0, 500])
def test_one_part_is_always_remembered(num_lines: int) -> None:
    """Its size does not matter: the reply that has read it needs it."""
    cache = PartCache(max_rows=1)
    cache.put_part("a", part_of(*range(num_lines)))
    cache.put_part("b", part_of(*range(num_lines)))
    assert cache.part("a") is None
    assert list(cache.part("b") or ()) == list(part_of(*range(num_lines)))


def test_rows_of_a_segment_stand_one_after_another() -> None:
    """They begin at its first byte."""
    whole, truncated = RowKind.WHOLE, RowKind.TRUNCATED
    rows = [(3, 0, 10, whole), (7, 10, 15, truncated)]
    assert list(PartRows.from_segment([(3, 10), (7, 5)], whole, {7})) == rows
    assert list(PartRows.from_segment([], whole)) == []
