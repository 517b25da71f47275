"""Tables in every format, and the message for each damaged one."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from tests.long_parameters import with_long
from tidemill.batch.file.formats import FormatError
from tidemill.batch.table.cells import NoText, cells_of
from tidemill.batch.table.detection import detect_table
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import open_table

TABLE = pa.table({"id": pa.array([1, 2]), "text": ["a", None]})


def parquet(table: pa.Table = TABLE, row_group_size: int = 1) -> bytes:
    """Return a table as Parquet."""
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=row_group_size)
    return file.getvalue()


def arrow(table: pa.Table = TABLE, *, is_stream: bool = False) -> bytes:
    """Return a table as Arrow IPC."""
    file = io.BytesIO()
    make = ipc.new_stream if is_stream else ipc.new_file
    with make(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """Read all columns of a table."""
    table = open_table(io.BytesIO(data))
    names = table.schema.names
    batches = [*table.batches(names), *table.batches(names)]
    found: list[dict[str, Any]] = [row for batch in batches for row in batch.to_pylist()]
    assert found[: len(found) // 2] == found[len(found) // 2 :]  # it can be read again
    return found[: len(found) // 2]


@pytest.mark.parametrize("data", [parquet(), arrow(), arrow(is_stream=True)])
def test_typed_tables_are_read_as_they_are(data: bytes) -> None:
    """Row groups and batches follow each other."""
    assert rows_of(data) == [{"id": 1, "text": "a"}, {"id": 2, "text": None}]


@pytest.mark.parametrize(
    "data",
    [
        b"id,text\n1,a\n\n2,\n",
        b"id\ttext\r\n1\ta\r\n2\t",
        b"\xef\xbb\xbfid;text\n1;a\n2;\n",
        gzip.compress(b'id,"text"\n"1","a"\n2,""\n'),
    ],
)
def test_csv_has_texts_and_nulls(data: bytes) -> None:
    """The delimiter does not matter; blank lines are not rows."""
    assert rows_of(data) == [{"id": "1", "text": "a"}, {"id": "2", "text": None}]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_json_array_of_objects_is_a_table(
    indent: int | None, pack: Callable[[bytes], bytes]
) -> None:
    """The array may be compressed and multi-line; an array of requests is not a table."""
    rows = [{"id": 1, "text": "a"}, {"id": 2, "text": None}]
    data = pack(json.dumps(rows, indent=indent).encode())
    assert rows_of(data) == rows
    assert detect_table(data) == "jsonl"
    requests = [{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}]
    assert detect_table(pack(json.dumps(requests, indent=indent).encode())) is None


@pytest.mark.parametrize("data", [b"text\na\n\nb\n\n", b'text\r\na\r\n\r\nb\r\n""\r\n'])
def test_a_blank_line_of_a_one_column_csv_is_a_row(data: bytes) -> None:
    """CSV writers leave a line blank for an empty cell, so rows must stay one to one."""
    cells = [row["text"] for row in rows_of(data)]
    assert cells == ["a", None, "b", None]


def test_a_quoted_csv_cell_may_contain_anything() -> None:
    """It may contain newlines, delimiters and quotes."""
    assert rows_of(b'a,b\n"x\n,""y""",2\n') == [{"a": 'x\n,"y"', "b": "2"}]


def test_json_columns_are_inferred_from_all_rows() -> None:
    """The types of columns fit all rows together."""
    data = b'{"id": 1, "tags": ["a"]}\n{"id": 2.5, "more": {"x": 1}}\n'
    assert rows_of(data) == [
        {"id": 1.0, "tags": ["a"], "more": None},
        {"id": 2.5, "tags": None, "more": {"x": 1}},
    ]


def test_large_rows_come_in_small_batches() -> None:
    """The first rows of each row group determine the number."""
    wide = pa.table({"text": ["x" * 2**20] * 100})
    file = io.BytesIO()
    pq.write_table(wide, file, use_dictionary=False)
    sizes = [batch.num_rows for batch in open_table(file).batches(["text"])]
    assert sum(sizes) == 100
    assert max(sizes) <= 16


@pytest.mark.parametrize(
    "nest",
    with_long([lambda text: {"a": text}], [str, lambda text: [text]]),
    ids=["struct", "text", "list"],
)
def test_a_dictionary_is_decoded_little_by_little(nest: Callable[[str], Any]) -> None:
    """A text is stored once in a file, and many rows refer to it after short ones."""
    long, short = nest("x" * 2**20), nest("a")
    column = pa.array([short] * 20 + [long] * 200)
    data = parquet(pa.table({"text": column}), row_group_size=10_000)
    assert len(data) < 100_000
    sizes = [batch.num_rows for batch in open_table(io.BytesIO(data)).batches(["text"])]
    assert sum(sizes) == 220
    assert max(sizes) <= 64
    folded = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int8()), pa.array(["x" * 2**20]))
    batches = open_table(io.BytesIO(arrow(pa.table({"text": folded})))).batches(["text"])
    sizes = [batch.num_rows for batch in batches]
    assert (sum(sizes), max(sizes) <= 64) == (300, True)


def test_cells_are_texts_numbers_lists_and_structs() -> None:
    """Dates and times are text without trailing zeros, categories their values."""
    columns = {
        "time": pa.array([1767323045 * 10**6], pa.timestamp("us")),
        "day": pa.array([dt.date(2026, 1, 2)]),
        "price": pa.array([decimal.Decimal("1.50")]),
        "kind": pa.array(["x"]).dictionary_encode(),
        "bad": pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
        ),
    }
    cells = {name: cells_of(column)[0] for name, column in columns.items()}
    assert cells.pop("bad") == NoText("not UTF-8")
    assert cells == {
        "time": "2026-01-02 03:04:05",
        "day": "2026-01-02",
        "price": decimal.Decimal("1.50"),
        "kind": "x",
    }


WRONG = [
    (b"", "The table is empty"),
    (b"\n\n", "must contain the column names"),
    (b"a,a\n1,2\n", "more than one column named `a`"),
    (b"a,b\n1,2\n1\n", "Row 2 (line 3) of the CSV has 1 cells, but its header has 2"),
    (b'a,b\n1,"x"y\n', "stray quote, or a cell that is too long, in the row that starts at line 2"),
    (b'a,b\n1,2\n3,"x\n4,5\n', "in the row that starts at line 3"),
    (b"a,b\n1,\xff\n", "Line 2 of the CSV is not UTF-8: 0xff at byte 3"),
    ("a,b\n1,2\n".encode("utf-16"), "UTF-16"),
    (b'{"a": 1}\n{"a": "x"}\n', "Row 2 of the table has 'x' in column `a`"),
    (b'{"a": 1}\n[]\n', "Line 2 of the table is not a JSON object"),
    (b'{"a": 1}\n{"a"\n', "Line 2 of the table is not valid JSON"),
    (b'{"a": 123456789012345678901234567890}\n', "in column `a`"),
    (b'[{"a": 1}, 2]', "Element 2 of the table is not a JSON object"),
    (b'[{"a": 1}', "the array's `]` is missing"),
    (b'["a", "b"]\n["c", "d"]\n', "This looks like JSON arrays"),
    (b'{"a": 1},\n{"a": 2},\n', "A comma follows each line"),
    (b'"{\\"a\\": 1}"\n', "a JSON string that contains an object"),
    (b"PAR1 and no more", "The Parquet table is damaged or truncated"),
    (parquet()[:-9], "The Parquet table is damaged or truncated"),
    (parquet()[:4] + bytes(60) + parquet()[64:], "damaged or truncated, at row 1 or after it"),
    (arrow()[:-20], "The Arrow table is damaged or truncated"),
    (arrow(is_stream=True)[:-100], "The Arrow table is damaged or truncated"),
    (b"PK\x03\x04", "zip archive"),
    (gzip.compress(b"a,b\n1,2\n")[:-9], "gzip data is truncated"),
    # Members one after another: processes that collect this compress a sixteenth of it.
    (gzip.compress(b"a\n") + gzip.compress(bytes(2**24)) * 16, "expands to more than"),
]


@pytest.mark.parametrize(("data", "words"), WRONG, ids=range(len(WRONG)))
def test_an_unreadable_table_is_reported(data: bytes, words: str) -> None:
    """The message has the row or line, if there is one."""
    with pytest.raises((TableError, FormatError)) as caught:
        rows_of(data)
    assert words in str(caught.value)


@pytest.mark.parametrize("codec", ["snappy", "gzip", "zstd", "lz4", "brotli", "none"])
def test_a_flipped_byte_gives_rows_or_a_message(codec: str) -> None:
    """No position of the byte raises another exception."""
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["some text"] * 50, "n": range(50)}), file, compression=codec)
    data = bytearray(file.getvalue())
    for place in range(4, len(data), 29):
        broken = bytes(data[:place]) + bytes([data[place] ^ 0xFF]) + bytes(data[place + 1 :])
        try:
            table = open_table(io.BytesIO(broken))
            for batch in table.batches(table.schema.names):
                for column in batch.columns:
                    cells_of(column)
        except TableError:
            pass
