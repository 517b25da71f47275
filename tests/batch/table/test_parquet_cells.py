"""First cells of Parquet columns, compared with Arrow's."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidemill.batch.table.errors import NotReadHere
from tidemill.batch.table.parquet_cells import first_bytes, first_cells
from tidemill.batch.table.parquet_sizes import read_footer

COLUMNS: dict[str, Any] = {
    "text": ["grün", None, "a" * 300 + "b", "more"] * 50,
    "repeated": ["ab" * 90] * 200,
    "number": pa.array([None, -5, 2**31 - 1, 4] * 50, pa.int32()),
    "large": pa.array([2**62, -1, None, 4] * 50, pa.int64()),
    "small": pa.array([1.5, None, -0.25, 4] * 50, pa.float32()),
    "real": pa.array([1e300, 0.1, None, 4] * 50, pa.float64()),
    "is_good": [True, None, False, True] * 50,
}
DAY = pa.array([1, 2], pa.date32())


def written(table: pa.Table, **options: Any) -> bytes:
    """Return a table as Parquet."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def cells(data: bytes, name: str) -> list[Any]:
    """Return the first cells of a column."""
    footer = read_footer(io.BytesIO(data))
    assert footer is not None
    start, end = first_bytes(footer, name)
    return first_cells(footer, name, data[start:end])


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "lz4", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_cells_are_those_that_arrow_reads(
    compression: str,
    version: str,
    use_dictionary: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Pages of both versions, each compression and encoding have the same cells, nulls included."""
    options = {"compression": compression, "data_page_version": version}
    table = pa.table(COLUMNS)
    data = written(table, use_dictionary=use_dictionary, **options)
    for name in table.column_names:
        assert cells(data, name) == table[name][:3].to_pylist(), name
    needed = pa.table(
        [pa.array(["x", "y"])], schema=pa.schema([pa.field("needed", pa.string(), nullable=False)])
    )
    assert cells(written(needed, use_dictionary=use_dictionary, **options), "needed") == ["x", "y"]


@pytest.mark.parametrize(
    ("column", "options", "reason"),
    [
        (DAY, {}, "neither text nor a number"),
        (pa.array([1], pa.uint32()), {}, "neither text nor a number"),
        (pa.array([b"x"]), {}, "neither text nor a number"),
        (pa.array([["a"]]), {}, "nested"),
        (pa.array(["a"]), {"compression": "brotli"}, "compression is Brotli"),
        (pa.array(["x" * 2**20]), {"compression": "none"}, "too large or damaged"),
        (pa.array(["x" * 2**24]), {}, "too large or damaged"),
        (
            pa.array([1, 2]),
            {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"},
            "too large or damaged",
        ),
    ],
)
def test_other_columns_are_named(column: Any, options: dict[str, Any], reason: str) -> None:
    """Each has a reason; nothing is read wrongly."""
    with pytest.raises(NotReadHere, match=reason):
        cells(written(pa.table({"a": column}), **options), "a")


def test_a_column_is_not_confused_with_a_field_of_another_one() -> None:
    """The schema lists the fields of a struct before the next column."""
    table = pa.table({"meta": [{"text": 1}], "text": ["good"]})
    assert cells(written(table), "text") == ["good"]


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd"])
def test_no_damage_raises_another_error(compression: str) -> None:
    """Truncated and changed bytes are a reason, or other cells."""
    data = written(pa.table(COLUMNS), compression=compression)
    footer = read_footer(io.BytesIO(data))
    assert footer is not None
    for name in COLUMNS:
        with pytest.raises(NotReadHere):  # its first number does not end
            first_cells(footer, name, b"\xff" * 100_000)
        start, end = first_bytes(footer, name)
        for at in range(start, min(end, start + 120)):
            for damaged in (data[start:at], data[start:at] + b"\xff" + data[at + 1 : end]):
                with suppress(NotReadHere):
                    first_cells(footer, name, damaged)
