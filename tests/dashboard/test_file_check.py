"""Checks of files before their upload, from their first bytes."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.fleet import WorkerRate
from tidemill.dashboard import recipe_check
from tidemill.dashboard.checked_file import CheckOptions, FileCheck, FileStart, estimate
from tidemill.dashboard.file_check import check_file
from tidemill.dashboard.render import render

HEAD_BYTES = 2**16
CSV = b"id,text\n" + b"".join(
    b'%d,"a ""quoted"" <b>text</b>\nof two lines"\n' % number for number in range(9000)
)
PROMPT = {"prompt": "Label: {{ text }}"}


def line(number: object, **body: Any) -> bytes:
    """Return a request for the model of these tests."""
    message = {"role": "user", "content": f"question {number} <script>"}
    fields = {"model": "m", "messages": [message], "max_tokens": 10}
    request = {"custom_id": str(number), "url": "/v1/chat/completions", "body": fields | body}
    return json.dumps(request).encode() + b"\n"


LINES = b"".join(map(line, range(9000)))


def checked(data: bytes, name: str = "x.jsonl", **options: Any) -> FileCheck:
    """Return the check of a file of which a browser has sent the beginning and the end."""
    start = FileStart(name, len(data), data[:HEAD_BYTES], data[-HEAD_BYTES:])
    return check_file(start, CheckOptions({"m": "m", "other": "other"}, **options))


def page_of(check: FileCheck) -> str:
    """Return the check as HTML."""
    found = estimate(check, WorkerRate(), None)
    return render("check.html", check=check, estimate=found, has_price=False, currency="USD")


def test_media_of_another_tenant_are_an_error() -> None:
    """The sentence is that of intake, before anything is uploaded."""
    part = {"type": "image_url", "image_url": {"url": "s3://bucket/media/other/a"}}
    data = line(1, messages=[{"role": "user", "content": [part]}])
    [error] = checked(data, media=AllowedMedia("bucket", "acme")).errors
    assert "Line 1: `messages.0.content.0` has another prefix" in error
    assert checked(data).errors == []


@pytest.mark.parametrize(
    ("data", "kind", "cut"),
    [
        (LINES, "JSONL of requests", "lines"),
        (gzip.compress(LINES), "JSONL of requests", "lines"),
        (b"[" + LINES.strip().replace(b"\n", b",\n") + b"]", "JSON array of requests", "array"),
    ],
)
def test_requests_of_each_format(data: bytes, kind: str, cut: str) -> None:
    """The number of rows is extrapolated, and the first requests are shown."""
    check = checked(data)
    assert (check.kind, check.cut, check.errors) == (kind, cut, [])
    assert check.num_rows == pytest.approx(9000, rel=0.05)
    assert not check.is_exact
    assert check.can_start
    assert check.can_try
    assert check.requests[0] == [("user", "question 0 <script>")]
    assert (check.models, check.endpoint) == (["m"], "/v1/chat/completions")
    assert check.expected is not None
    assert check.expected.output == pytest.approx(90_000, rel=0.05)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ({"recordId": "a", "modelInput": {}}, "JSONL of Bedrock records"),
        ({"custom_id": "a", "params": {}}, "JSONL of Anthropic requests"),
        ({"key": "a", "request": {}}, "JSONL of Gemini requests"),
        ({"custom_id": "a", "body": {}}, "JSONL of requests without `url`"),
        ({}, "JSONL of chats"),
    ],
)
def test_requests_of_other_vendors(line: dict[str, Any], kind: str) -> None:
    """They need no recipe, and are shown as chats."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    if "request" in line:
        body = {"model": "m", "contents": [{"parts": [{"text": "Hi"}]}]}
    given = {name: value if value == "a" else body for name, value in line.items()} or body
    check = checked(b"\n".join([json.dumps(given).encode()] * 2).replace(b'"a"', b'"b"', 1))
    assert (check.kind, check.errors, check.num_rows) == (kind, [], 2)
    assert check.requests == [[("user", "Hi")]] * 2
    assert check.can_start


def test_a_file_without_a_last_newline_is_read_to_its_end() -> None:
    """Its rows are counted, and there is no trial of so few."""
    check = checked((line(1) + line(2)).rstrip())
    assert (check.num_rows, check.is_exact, check.can_start, check.can_try) == (
        2,
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("data", "name", "error"),
    [
        (b"nonsense\n" + LINES, "x.jsonl", "Line 1: not JSON: expected ident at byte 2"),
        (line(1) + line(1), "x.jsonl", "Line 2: `custom_id` is already used in line 1"),
        (line(1) + line(2, model="other"), "x.jsonl", "Line 2: the model is 'other', but earlier"),
        (line(1, model="x"), "x.jsonl", "Line 1: The model `x` does not exist. Served: m, other."),
        (b"\n\n", "x.jsonl", "The file has no lines"),
        ("a,b\n".encode("utf-16"), "x.csv", "The file is UTF-16: save it as UTF-8."),
        (b"PK\x03\x04 xl/workbook.xml", "x.xlsx", "The file is an Excel workbook: save it as CSV"),
        (gzip.compress(LINES)[:99] + bytes(99), "x.jsonl.gz", "The gzip data is damaged at byte"),
        (b"a,b\n1,2\n3\n", "x.csv", "Row 2 (line 3) of the CSV has 1 cells"),
        (b"a,a\n1,2\n", "x.csv", "The table has more than one column named `a`"),
        (b"a,b\n", "x.csv", "The table has no rows."),
        (b"PAR1 and no footer", "x.parquet", "The Parquet table is truncated"),
    ],
)
def test_what_cannot_run_is_not_uploaded(data: bytes, name: str, error: str) -> None:
    """The sentence is that of intake."""
    check = checked(data, name)
    assert not check.can_start
    assert check.errors[0].startswith(error)
    assert "This file cannot run" in page_of(check)


def test_invalid_lines_may_be_skipped() -> None:
    """Their number and the first of them are a note."""
    check = checked(b'{"custom_id": 1}\n' + LINES, on_invalid_line="skip")
    assert check.can_start
    assert "1 of the first" in check.notes[0]
    assert "`custom_id` must be a string" in check.notes[0]


def test_unknown_parameters_are_noted_or_refused() -> None:
    """The form decides."""
    data = line(1, temprature=1)
    assert "did you mean `temperature`?" in checked(data).notes[0]
    assert not checked(data, strict_parameters=True).can_start


def test_a_line_longer_than_the_head_is_left_to_intake() -> None:
    """Ten megabytes are a valid request, so that it is not refused."""
    check = checked(line("x" * 10_000_000))
    assert (check.can_start, check.can_try, check.num_rows) == (True, False, None)
    assert "too long to be checked here" in page_of(check)


@pytest.mark.parametrize("data", [CSV, gzip.compress(CSV), CSV.replace(b",", b"\t")])
def test_a_table_needs_a_recipe(data: bytes) -> None:
    """Its columns are listed, and its first prompts are rendered by intake's own code."""
    check = checked(data, "x.csv")
    assert [(each.name, each.expression) for each in check.columns] == [
        ("id", "{{ id }}"),
        ("text", "{{ text }}"),
    ]
    assert check.needs_recipe
    assert not check.can_start
    check = checked(data, "x.csv", recipe={**PROMPT, "id": "id", "params": {"model": "m"}})
    assert check.errors == []
    assert check.can_start
    assert check.can_try
    shown = 'Label: a "quoted" <b>text</b>\nof two lines'
    assert check.requests[0] == [("user", shown)]
    assert check.num_rows == pytest.approx(9000, rel=0.05)
    assert "&lt;b&gt;text" in page_of(check)


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        (
            {"prompt": "{{ txt }}"},
            "The prompt names `txt`, which is not a column of the table: did",
        ),
        ({"prompt": "{{ text"}, "The prompt is not valid Jinja: line 1"),
        ({**PROMPT, "id": "no"}, "The recipe names `no`, which is not a column"),
        ({"ask": ["text: Is it good?"]}, "The question `text` needs a column `text`, which the"),
        ({"ask": ["Is it good?"]}, "The question 'Is it good?' has no colon"),
        ({**PROMPT, "params": {"model": "x"}}, "Row 1: The model `x` does not exist."),
        (PROMPT, "Row 1: `model` is required."),
    ],
)
def test_errors_of_a_recipe_are_about_the_form(recipe: dict[str, Any], error: str) -> None:
    """Each says what to change."""
    check = checked(CSV, "x.csv", recipe=recipe)
    assert check.errors[0].startswith(error)
    assert not check.can_start


def test_rows_of_json() -> None:
    """Lines and arrays of objects that are not requests are tables."""
    recipe = {"prompt": "{{ a }} {{ b }}", "params": {"model": "m"}}
    for data in (b'{"a": 1, "b": "x"}\n' * 3, b'[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]'):
        check = checked(data, "rows.json", recipe=recipe)
        assert check.requests[0] == [("user", "1 x")]
        assert check.endpoint == "/v1/chat/completions"


def test_the_first_rows_of_a_parquet_table() -> None:
    """The footer has the columns and the number of rows; the browser sends the first cells."""
    table = pa.table(
        {"struct": [{"a": 1, "b": [1]}] * 5000, "text": [f"text {each}" for each in range(5000)]}
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    recipe = {**PROMPT, "params": {"model": "m", "max_tokens": 10}}
    check = checked(sink.getvalue(), "x.parquet", recipe=recipe)
    assert [each.name for each in check.columns] == ["struct", "text"]
    assert (check.num_rows, check.is_exact, check.can_start) == (5000, True, True)
    assert check.expected is not None
    assert check.expected.output == 50_000
    assert "is not a column" in checked(sink.getvalue(), recipe={"prompt": "{{ x }}"}).errors[0]
    assert check.requests[2][0][1].endswith("text 2")  # all of it is in the first bytes
    data = sink.getvalue()
    check = check_file(FileStart("x", len(data), data[:9], data), CheckOptions({"m": "m"}, recipe))
    assert not check.requests
    assert 'data-ranges="' in page_of(check)
    parts = {at: data[at:end] for at, end in check.ranges}
    start, models = FileStart("x", len(data), data[:9], data, parts), {"m": "m"}
    check = check_file(start, CheckOptions(models, recipe))
    assert [request[0][1].endswith(f"text {n}") for n, request in enumerate(check.requests)] == [
        True
    ] * 3
    assert (check.num_rows, check.can_start, check.ranges) == (5000, True, ())
    nested = {"prompt": "{{ struct }}", "params": {"model": "m"}}
    [note] = check_file(start, CheckOptions(models, nested)).notes
    assert "column `struct` cannot be read here, because it has nested values" in note
    wrong = check_file(start, CheckOptions(models, recipe | {"id": "text", "prompt": "{{ 1/0 }}"}))
    assert wrong.errors[0].startswith("Row 1: the prompt cannot be rendered")


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_first_rows_of_an_arrow_table(compression: str | None) -> None:
    """The schema has the columns; the browser sends the bytes that each answer requests."""
    table = pa.table({"id": range(50_000), "text": [f"text {each}" for each in range(50_000)]})
    sink = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=compression)
    with ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data, recipe = sink.getvalue(), {**PROMPT, "params": {"model": "m"}}
    parts: dict[int, bytes] = {}
    assert [each.name for each in checked(data).columns] == ["id", "text"]
    for head_bytes in (65_536, 9):
        for _ in range(8):
            start = FileStart("x", len(data), data[:head_bytes], parts=parts)
            check = check_file(start, CheckOptions({"m": "m"}, recipe))
            if not check.ranges:
                break
            parts |= {at: data[at:end] for at, end in check.ranges}
        assert check.can_start
        assert sum(map(len, parts.values())) < (300_000 if compression == "zstd" else 30_000)
        assert len(parts) < 5
        assert [request[0][1].split(": ")[1] for request in check.requests] == [
            f"text {each}" for each in range(3)
        ]
    assert "is not a column" in checked(data, recipe={"prompt": "{{ x }}"}).errors[0]
    assert "is truncated: it ends within its schema" in checked(data[:40]).errors[0]
    described = table.replace_schema_metadata({"pandas": "x" * 2**21})
    sink = io.BytesIO()
    with ipc.new_file(sink, described.schema) as writer:
        writer.write_table(described)
    check = checked(sink.getvalue(), recipe=recipe)
    assert (check.can_start, check.columns) == (True, [])
    assert "columns are not known before the upload" in check.notes[0]


def test_the_estimate_uses_the_measured_rate_and_the_price() -> None:
    """It is unknown before the model has run once, and has no cost without a price."""
    check = checked(line(1))
    rate = WorkerRate(expected_work_per_second=0.01, num_gpus=2)
    found = estimate(check, rate, 3.6)
    assert found is not None
    assert check.expected is not None
    assert found.seconds is not None
    assert found.seconds == pytest.approx(check.expected.work / 0.01)
    assert found.cost == pytest.approx(found.seconds * 2 * 3.6 / 3600)
    page = page_of(check)
    assert "unknown until this model has run once" in page
    assert "gpu_hour_price" in page


def test_hostile_names_are_text() -> None:
    """Columns and cells of a table are escaped."""
    check = checked(b'<img src=x>,"{{ b }}"\n\xe2\x80\xaeleft,2\n', "x.csv", recipe=PROMPT)
    page = page_of(check)
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page
    assert check.errors


def test_a_slow_prompt_is_rendered_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page would wait for minutes otherwise; the errors of these rows are shown."""
    monkeypatch.setattr(recipe_check, "RENDER_SECONDS", 0)
    prompt = "{% for one in range(9999) %}{% for two in range(9999) %}x{% endfor %}{% endfor %}"
    check = checked(CSV, "x.csv", recipe={"prompt": prompt})
    assert check.num_read == check.num_errors == 1
    assert check.errors[0].startswith("Row 1: the prompt cannot be rendered: it takes more than")
