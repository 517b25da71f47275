"""First cells of Arrow columns, compared with Arrow's."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.batch.table.test_parquet_cells import COLUMNS
from tidemill.batch.table.arrow_cells import ArrowCells
from tidemill.batch.table.errors import NotReadHere, TableError
from tidemill.batch.table.flatbuffers import FlatTable

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


def written(table: pa.Table, *, is_stream: bool = False, **changes: Any) -> bytes:
    """Return a table as an Arrow file or stream."""
    sink, options = io.BytesIO(), ipc.IpcWriteOptions(**changes)
    new = ipc.new_stream if is_stream else ipc.new_file
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=150)
    return sink.getvalue()


def sliced(data: bytes, start: int, end: int) -> bytes:
    """Return bytes of a file."""
    return data[start:end]


def opened(data: bytes) -> ArrowCells:
    """Return the columns of a table."""
    return ArrowCells(partial(sliced, data), len(data))


def cells(data: bytes, name: str, count: int = 3) -> list[Any]:
    """Return the first cells of a column."""
    return opened(data).first(name, count)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_cells_are_those_that_arrow_reads(is_stream: bool, compression: str | None) -> None:  # noqa: FBT001
    """Texts, numbers and booleans have the same cells, nulls included, between other columns."""
    table = pa.table(MORE)
    data = written(table, is_stream=is_stream, compression=compression)
    found = opened(data)
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

    assert ArrowCells(read, len(data)).first("b", 3) == ["y"] * 3
    assert num_bytes < 2000


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array(["x" * 2**19]), "texts are too long"),
        (pa.array([1.5], pa.float16()), "neither text nor a number"),
        (pa.array([], pa.string()), "the table has no rows"),
    ],
)
def test_other_columns_have_a_reason(column: Any, reason: str) -> None:
    """It is for the author of the file."""
    with pytest.raises(NotReadHere, match=reason):
        cells(written(pa.table({"a": column})), "a")


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_damaged_tables_are_refused(compression: str | None) -> None:
    """No byte leads to another error, or to much work."""
    data = written(pa.table({"a": ["text", None], "b": [1, 2]}), compression=compression)
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
            with suppress(NotReadHere, TableError):
                found = opened(damaged)
                for name in {"a", "b"} & {*(found.names or ())}:
                    found.first(name, 3)


def test_dictionaries_before_the_first_rows_are_not_read() -> None:
    """The footer of a file names the first rows, behind any number of dictionaries."""
    words = pa.array(["x" * 100, "y"] * 5).dictionary_encode()
    data = written(pa.table({**{f"c{n}": words for n in range(100)}, "a": ["text"] * 10}))
    places: set[int] = set()

    def read(start: int, end: int) -> bytes:
        places.add(start)
        return data[start:end]

    found = ArrowCells(read, len(data))
    places.clear()
    assert found.first("a", 3) == ["text"] * 3
    assert len(places) < 10
    for at in range(len(data) - 100, len(data)):
        for damaged in (data[:at], data[:at] + b"\xff" + data[at + 1 :]):
            with suppress(NotReadHere):
                opened(damaged).first("a", 3)


def test_messages_without_a_mark_are_read() -> None:
    """Arrow wrote them so until version 0.15, and writes them so on request."""
    table = pa.table({"a": ["text", None], "b": [1, 2]})
    found = opened(written(table, use_legacy_format=True))
    assert (found.names, found.first("a", 3)) == (["a", "b"], ["text", None])


def test_a_schema_that_is_not_read_here_has_unknown_columns() -> None:
    """Such a table is valid; only one that ends within its schema is refused."""
    many = pa.schema([(f"c{place}", pa.int8()) for place in range(20_001)])
    described = pa.schema([("a", pa.int8())], metadata={"pandas": "x" * 2**20})
    for schema in (many, described):
        assert opened(written(schema.empty_table())).names is None
    for end in (9, 40, 100):
        with pytest.raises(TableError, match="is truncated"):
            opened(written(pa.table({"a": [1]}))[:end])


def test_fields_that_share_a_long_name_are_not_read() -> None:
    """Their names would take a thousand times the bytes of the schema."""
    schema = pa.schema([("x" * 60_000, pa.int8()), *((f"c{n}", pa.int8()) for n in range(1000))])
    data = bytearray(written(schema.empty_table()))
    start, fields = 16, FlatTable.root(bytes(data[16:])).table(2)
    place, number = fields._vector(1)
    target = place + struct.unpack_from("<I", data, start + place)[0]
    for entry in range(place, place + 4 * number, 4):
        struct.pack_into("<I", data, start + entry, target - entry)
    assert opened(bytes(data)).names is None


def test_texts_behind_many_others_are_not_unpacked() -> None:
    """All bytes before a text would be unpacked to reach it."""
    size = 2**23
    view = pa.py_buffer(struct.pack("<i4sii", 20, b"xxxx", 0, size - 20))
    column = pa.Array.from_buffers(pa.string_view(), 1, [None, view, pa.py_buffer(b"x" * size)])
    table = pa.table({"a": column})
    assert cells(written(table), "a") == ["x" * 20]
    with pytest.raises(NotReadHere, match="behind many others"):
        cells(written(table, compression="lz4"), "a")
