"""Cells of a few rows of each kind of table."""

from __future__ import annotations

import gzip
import io

import pytest

from tidemill.batch.table import row_cells
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.row_cells import read_cells

CSV = b'\xef\xbb\xbfid,text\n1,"a\nb"\n2,\n3,c\n'
JSON = b'{"id": 1, "text": "a\\nb"}\n\n{"id": 2}\n{"id": 3, "text": ["c"]}\n'
ARRAY = b'[{"id": 1, "text": "a\\nb"},\n {"id": 2}, {"id": 3, "text": ["c"]}]'


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("data", "second", "third"),
    [
        (CSV, {"id": "2", "text": ""}, {"id": "3", "text": "c"}),
        (CSV.replace(b",", b"\t"), {"id": "2", "text": ""}, {"id": "3", "text": "c"}),
        (JSON, {"id": 2}, {"id": 3, "text": ["c"]}),
        (ARRAY, {"id": 2}, {"id": 3, "text": ["c"]}),
    ],
)
def test_rows_are_found_by_number(
    pack: type[bytes], data: bytes, second: dict[str, object], third: dict[str, object]
) -> None:
    """Rows are counted like the requests that are made of them; others are not read."""
    assert read_cells(io.BytesIO(pack(data)), {2, 3, 9}) == {2: second, 3: third}
    assert read_cells(io.BytesIO(pack(data)), ()) == {}


def test_a_limited_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after the limit have no cells, and no later row is read."""
    monkeypatch.setattr(row_cells, "READ_BYTES", 8)
    damaged = CSV + b'4,"'
    assert read_cells(io.BytesIO(damaged), {1, 3, 4}) == {1: {"id": "1", "text": "a\nb"}}


def test_a_damaged_row_is_an_error() -> None:
    """A row before the last one wanted has too many cells."""
    with pytest.raises(TableError, match="Row 1"):
        read_cells(io.BytesIO(b"a,b\n1,2,3\n4,5\n"), {2})
    assert read_cells(io.BytesIO(b'{"custom_id": "a", "body": {}}\n'), {1}) == {}
