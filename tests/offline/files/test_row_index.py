"""The index of rows by custom id."""

from __future__ import annotations

from collections import defaultdict
from random import Random

from tidemill.offline.files.row_file import RowPlace, StoredRow
from tidemill.offline.files.row_index import RowIndex


def row(custom_id: str | None, row_id: str | None = None) -> StoredRow:
    """Return a row of an id."""
    return StoredRow(row_id, custom_id, {}, None)


def test_rows_of_one_id_are_found_in_their_order() -> None:
    """Each once, whatever the order of the questions; the others are left, in the file's order."""
    random = Random(0)
    ids = [str(random.randrange(500)) for _ in range(2000)] + ["\ud800"]
    index, places = RowIndex(), defaultdict(list)
    for number, custom_id in enumerate(ids):
        place = RowPlace(number + 1, 10 * number, 10)
        index.add(row(custom_id), place)
        places[custom_id].append(place)
    for custom_id in random.sample(ids, 1500):
        assert index.pop(row(custom_id)) == places[custom_id].pop(0)
    left = sorted(place for found in places.values() for place in found)
    assert [*index.left()] == left
    assert index.pop(row("500")) is None


def test_an_id_that_is_repeated_a_hundred_thousand_times_is_as_fast() -> None:
    """It has one slot, and its rows are a chain."""
    index = RowIndex()
    for number in range(100_000):
        index.add(row("a"), RowPlace(number, number, 1))
    assert all(index.pop(row("a")) == RowPlace(n, n, 1) for n in range(100_000))
    assert index.pop(row("a")) is None
    assert [*index.left()] == []


def test_rows_without_a_custom_id_go_by_their_own() -> None:
    """They are found by their own ID, which is the same for the same line in every run."""
    index = RowIndex()
    index.add(row(None, "batch_req_1"), RowPlace(1, 0, 5))
    assert index.pop(row("batch_req_1")) is None
    assert index.pop(row(None, "batch_req_1")) == RowPlace(1, 0, 5)
    assert RowIndex().pop(row("a")) is None
