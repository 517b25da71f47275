"""First cells of Arrow columns, compared with Arrow's."""

from __future__ import annotations

import io
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.batch.table.test_parquet_cells import COLUMNS
from tidemill.batch.table.arrow_cells import ArrowCells
from tidemill.batch.table.errors import NotReadHere, TableError

NESTED = pa.array([{"a": [1, 2], "b": {"c": "x"}}] * 200)
MORE: dict[str, Any] = {
    **COLUMNS,
    "nested": NESTED,
    "fixed": pa.array([[1, 2]] * 200, pa.list_(pa.int8(), 2)),
    "map": pa.array([[("k", 1)]] * 200, pa.map_(pa.string(), pa.int32())),
    "category": pa.array(["u", "v"] * 100).dictionary_encode(),
    "nothing": pa.nulls(200),
    "day": pa.array([1] * 200, pa.date32()),
    "long_text": pa.array(["lö", None, ""] * 66 + ["a"] * 2, pa.large_string()),
    "view": pa.array(["short", None, "longer than twelve bytes", "x"] * 50, pa.string_view()),
    "views": pa.array([b"longer than twelve bytes"] * 200, pa.binary_view()),
    "bytes": pa.array([7, None, 255, 0] * 50, pa.uint8()),
    "late": ["after all others", "x", None, "y"] * 50,
}
READ = {*COLUMNS, "nothing", "long_text", "view", "bytes", "late"}


def written(table: pa.Table, *, is_stream: bool = False, compression: str | None = None) -> bytes:
    """Return a table as an Arrow file or stream."""
    sink, options = io.BytesIO(), ipc.IpcWriteOptions(compression=compression)
    new = ipc.new_stream if is_stream else ipc.new_file
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=150)
    return sink.getvalue()


def sliced(data: bytes, start: int, end: int) -> bytes:
    """Return bytes of a file."""
    return data[start:end]


def cells(data: bytes, name: str, count: int = 3) -> list[Any]:
    """Return the first cells of a column."""
    return ArrowCells(partial(sliced, data)).first(name, count)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_cells_are_those_that_arrow_reads(is_stream: bool, compression: str | None) -> None:  # noqa: FBT001
    """Texts, numbers and booleans have the same cells, nulls included, between other columns."""
    table = pa.table(MORE)
    data = written(table, is_stream=is_stream, compression=compression)
    found = ArrowCells(partial(sliced, data))
    assert found.names == table.column_names
    for name in table.column_names:
        if name in READ:
            assert found.first(name, 3) == table[name][:3].to_pylist(), name
            assert found.first(name, 150) == table[name][:150].to_pylist(), name
            assert found.first(name, 500) == table[name][:150].to_pylist(), name
        else:
            with pytest.raises(NotReadHere, match=f"column `{name}` cannot be read here"):
                found.first(name, 3)


def test_few_bytes_are_read() -> None:
    """The schema, the header of a batch and the first cells are read."""
    table = pa.table({"a": ["x" * 1000] * 100_000, "b": ["y"] * 100_000})
    sink = io.BytesIO()
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data, num_bytes = sink.getvalue(), 0

    def read(start: int, end: int) -> bytes:
        nonlocal num_bytes
        num_bytes += end - start
        return data[start:end]

    assert ArrowCells(read).first("b", 3) == ["y"] * 3
    assert num_bytes < 2000


@pytest.mark.parametrize(
    ("column", "compression", "reason"),
    [
        (pa.array(["x" * 2**19]), None, "texts are too long"),
        (pa.array(["x"]), "zstd", "its compression is zstd"),
        (pa.array([1.5], pa.float16()), None, "neither text nor a number"),
        (pa.array([], pa.string()), None, "the table has no rows"),
    ],
)
def test_other_columns_have_a_reason(column: Any, compression: str | None, reason: str) -> None:
    """It is for the author of the file."""
    with pytest.raises(NotReadHere, match=reason):
        cells(written(pa.table({"a": column}), compression=compression), "a")


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_damaged_tables_are_refused(compression: str | None) -> None:
    """No byte leads to another error, or to much work."""
    data = written(pa.table({"a": ["text", None], "b": [1, 2]}), compression=compression)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
            with suppress(NotReadHere, TableError):
                found = ArrowCells(partial(sliced, damaged))
                for name in {"a", "b"} & {*found.names}:
                    found.first(name, 3)
