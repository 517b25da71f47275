"""Cells of every Arrow type: a value or one message, in prompts and in each output format."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from tests.batch.table.arrow_types import GREATEST, LEAST, columns
from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.table.cells import NoText, cells_of, output_cells, problem_of
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.stored_types import storage_problem
from tidemill.batch.table.table_check import check_cells, checked_template
from tidemill.batch.table.writer import open_writer

ALL = list(columns())
FORMATS: Any = ("parquet", "arrow", "csv", "tsv", "jsonl")


def refusal(column: pa.Array, form: Any = None, **given: Any) -> str | None:
    """Return the error of a table with this column."""
    recipe = parse_recipe({"prompt": "x", **given})
    try:
        checked_template(recipe, pa.schema([("c", column.type)]), form)
    except RecipeError as exc:
        return str(exc)
    return None


@pytest.mark.parametrize("template", ["{{ c }}", "{{ c or '' }}", "{{ c | tojson }}"])
def test_each_type_gives_a_prompt_or_an_error(template: str) -> None:
    """Each row has a prompt or an error with its column, also in a slice of a batch."""
    made = RequestTemplate(parse_recipe({"prompt": template}), ["c"])
    for column in ALL:
        try:
            check_cells(made, pa.schema([("c", column.type)]))
        except RecipeError as exc:
            assert str(exc).startswith("column `c` ")  # noqa: PT017 - one of two outcomes
            continue
        for part in (column, column.slice(1), column.slice(0, 0)):
            lines = list(made.lines({"c": cells_of(part)}, len(part), 1))
            assert len(lines) == len(part)
            for number, line in enumerate(lines, 1):
                try:
                    content = parse_line(RawLine(number, line)).body["messages"][0]["content"]
                except LineError as exc:
                    assert "column `c` is " in exc.message  # noqa: PT017 - one of two outcomes
                else:
                    assert "object at 0x" not in str(content)
                    assert "value out of range" not in str(content)


@pytest.mark.parametrize("form", FORMATS)
def test_each_type_is_written_or_refused(form: Any) -> None:
    """Several batches of a type are written with their values, or the recipe is refused."""
    for column in ALL:
        if (problem := storage_problem(column.type, form)) is not None:
            assert problem.reason.startswith(("which ", "with ", "and "))
            continue
        parts = [column, column.slice(1), column.slice(0, 1), column.slice(0, 0)]
        file = io.BytesIO()
        writer = open_writer(file, pa.schema([("c", column.type)]), form)
        for part in parts:
            writer.write(pa.RecordBatch.from_arrays([part], names=["c"]))
        writer.close()
        file.seek(0)
        num_rows = sum(map(len, parts))
        if form in {"csv", "tsv"}:
            assert len(list(csv.reader(io.TextIOWrapper(file, newline="")))) == num_rows + 1
        elif form == "jsonl":
            assert [json.loads(line)["c"] for line in file] == json.loads(
                json.dumps([_plain(cell) for part in parts for cell in output_cells(part)])
            )
        else:
            table = pq.read_table(file) if form == "parquet" else ipc.open_file(file).read_all()
            assert table.num_rows == num_rows
            if problem_of(column.type) is None:
                found = [cell for chunk in table.column(0).chunks for cell in cells_of(chunk)]
                assert repr(found) == repr([cell for part in parts for cell in cells_of(part)])


def _plain(cell: Any) -> Any:
    """Return a cell as JSON reads it back."""
    if isinstance(cell, list):
        return [_plain(item) for item in cell]
    if isinstance(cell, dict):
        return {name: _plain(item) for name, item in cell.items()}
    if isinstance(cell, Decimal):
        return str(cell)
    return None if isinstance(cell, float) and abs(cell) != 1.5 else cell


def test_only_these_types_are_refused() -> None:
    """Few types have no value in a format, and most Arrow types work in a prompt."""
    flat = {
        form: {
            str(column.type)
            for column in ALL
            if _is_flat(column) and storage_problem(column.type, form) is not None
        }
        for form in ("parquet", "arrow", "jsonl")
    }
    zones = {f"timestamp[{unit}, tz=Mars/Phobos]" for unit in ("s", "ms", "us", "ns")}
    unions = {f"{kind}_union<0: string=0, 1: int64=1>" for kind in ("sparse", "dense")}
    large = "decimal256(74, -40)"
    assert flat["jsonl"] == zones | {"struct<x: string, x: string>", large}
    assert flat["parquet"] == unions | {"month_day_nano_interval", "struct<>", large}
    assert flat["arrow"] == set()


def _is_flat(column: pa.Array) -> bool:
    words = ("list<", "map<", "dictionary<", "run_end", "struct<x: ")
    return str(column.type) == "struct<x: string, x: string>" or not str(column.type).startswith(
        words
    )


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([3_723_500, None], pa.duration("ms")), ["PT1H2M3.5S", None]),
        (pa.array([0, -90_000], pa.duration("s")), ["PT0S", "-P1DT1H"]),
        (pa.array([LEAST, GREATEST], pa.duration("ns"))[1:], ["P106751DT23H47M16.854775807S"]),
        (pa.array([pa.MonthDayNano([14, -3, 1])]), ["P14M-3DT0.000000001S"]),
        (pa.array([pa.MonthDayNano([0, 0, 0])]), ["PT0S"]),
        (
            pa.array([[1], None], pa.list_(pa.timestamp("ns"))),
            [["1970-01-01 00:00:00.000000001"], None],
        ),
        (
            pa.array([{"d": 86_400}], pa.struct([("d", pa.timestamp("s", "UTC"))])),
            [{"d": "1970-01-02 00:00:00Z"}],
        ),
        (pa.array([10**6], pa.timestamp("us", "+05:30")), ["1970-01-01 05:30:01+0530"]),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), [[["a", 1]]]),
        (pa.array([Decimal(500)], pa.decimal128(3, -2)), [Decimal(500)]),
        (
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))),
            [str(UUID(int=0))],
        ),
        (pa.array([b"x"]), [NoText("bytes", "write the column as text")]),
        (
            pa.array([GREATEST], pa.timestamp("s", "UTC")),
            [NoText(f"a date or time out of range ({GREATEST})")],
        ),
    ],
)
def test_cells_have_one_text_in_each_place(column: pa.Array, expected: list[Any]) -> None:
    """Times and durations are printed with their unit, also inside lists and structs."""
    assert cells_of(column) == expected
    assert str(cells_of(column)[0]) == str(expected[0])  # of a decimal, too


def test_bytes_and_invalid_texts_have_a_text_in_csv_and_json() -> None:
    """Bytes are standard base64 without quotes, and invalid UTF-8 gets replacement characters."""
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    batch = pa.RecordBatch.from_arrays([pa.array([b"\xff>?"]), broken], names=["b", "t"])
    written = {}
    for form in FORMATS[2:]:
        file = io.BytesIO()
        open_writer(file, batch.schema, form).write(batch)
        written[form] = file.getvalue().decode()
    assert written["csv"] == "b,t\n/z4/,a\ufffd\n"
    assert json.loads(written["jsonl"]) == {"b": "/z4/", "t": "a\ufffd"}


def test_a_carriage_return_in_a_cell_is_quoted() -> None:
    """CSV readers end a row at an unquoted carriage return."""
    batch = pa.RecordBatch.from_pydict({"t": ["a\rb"], "n": [1]})
    file = io.BytesIO()
    open_writer(file, batch.schema, "csv").write(batch)
    assert list(csv.reader(io.StringIO(file.getvalue().decode(), newline=""))) == [
        ["t", "n"],
        ["a\rb", "1"],
    ]


def test_times_that_parquet_cannot_store_are_refused_by_value() -> None:
    """A time in seconds has a thousand times as many milliseconds, which may overflow."""
    kind = pa.struct([("x", pa.timestamp("s"))])
    column = pa.array([{"x": 1}, {"x": GREATEST}], kind)
    batch = pa.RecordBatch.from_arrays([column], names=["c"])
    recipe, schema = parse_recipe({"prompt": "x"}), batch.schema
    with pytest.raises(
        RecipeError, match="column `c` has a time at row 1 or after it that Parquet"
    ):
        checked_template(recipe, schema, "parquet", lambda _: [batch])
    checked_template(recipe, schema, "parquet", lambda _: [batch.slice(0, 1)])
    checked_template(recipe, schema, "arrow", lambda _: [batch])
    checked_template(
        parse_recipe({"prompt": "x", "keep": []}), schema, "parquet", lambda _: [batch]
    )


def test_an_error_has_the_column_the_type_and_the_remedy() -> None:
    """The remedies work: another format, or `keep` without the column."""
    column = pa.array([[pa.MonthDayNano([1, 2, 3])]])
    reason = refusal(column, "parquet")
    assert reason == (
        "column `c` contains month_day_nano_interval, which Parquet does not support: use "
        "`arrow` or `jsonl` as the output format, or remove the column from `keep`"
    )
    assert refusal(column, "arrow") is refusal(column, "jsonl") is None
    assert refusal(column, "parquet", keep=[]) is None
    assert refusal(pa.array([1], pa.timestamp("s", "Mars/Phobos")), prompt="{{ c }}") == (
        "column `c` is timestamp[s, tz=Mars/Phobos], and this machine does not know its time "
        "zone: convert it to UTC"
    )
