"""One line per row for every reader: no printed row has a character that ends a line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from tests.offline.conftest import Runner
from tests.offline.given import line
from tidemill.batch.file.lines import Line, LineError, RawLine
from tidemill.batch.file.rows import (
    print_cached,
    print_malformed,
    print_not_run,
    print_reply,
    reply_body,
)
from tidemill.batch.parts import EXPIRED, row_not_run
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.writer import open_writer
from tidemill.cli.batches.outcome import print_json
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import ModelNotFound
from tidemill.server.sse import format_event

SEPARATORS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Every character at which `str.splitlines` ends a line; Node's readline knows four of them."""

CHAT = "/v1/chat/completions"
DIGEST = "0123456789abcdef01234567"
TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from(SEPARATORS)).map(
    lambda text: text + SEPARATORS
)


def line_of(text: str) -> Line:
    """Return a line whose custom ID is a text."""
    return Line(3, text, CHAT, {}, DIGEST, f"req_{DIGEST}")


def table_row(text: str) -> bytes:
    """Return a row of a table with a text as column, cell and nested key."""
    batch = pa.RecordBatch.from_pylist([{text: text, "nested": {text: [text]}}])
    file = io.BytesIO()
    open_writer(file, batch.schema, "jsonl").write(batch)
    return file.getvalue()


def table_request(template: str, text: str) -> bytes:
    """Return the request of a table's row whose cell and ID are a text."""
    rendered = RequestTemplate(parse_recipe({"prompt": template, "id": "id"}), ("id",))
    return b"".join(rendered.lines({"id": [text]}, 1, 1))


PRINTERS: dict[str, Callable[[str], bytes]] = {
    "reply": lambda text: print_reply(line_of(text), 200, {text: text}),
    "error row": lambda text: print_reply(
        line_of(text), 404, error_body(ModelNotFound("m", (text,)))
    ),
    "vLLM's error row": lambda text: print_reply(
        line_of(text), 404, error_body(ModelNotFound("m", (text,))), dialect="vllm"
    ),
    "reused result": lambda text: print_cached(line_of(text), to_json({text: text})),
    "line that was not run": lambda text: print_not_run(DIGEST, text, code="c", message=text),
    "malformed line": lambda text: print_malformed(DIGEST, LineError(text, line=3, custom_id=text)),
    "expired line": lambda text: (
        row_not_run(RawLine(3, to_json({"custom_id": text, "url": CHAT, "body": {}})), EXPIRED)[
            0
        ].row
    ),
    "row of a table": table_row,
    "request of a table": lambda text: table_request("{{ id }}", text),
    "error of a table's cell": lambda text: table_request("{{ id + 1 }}", text),
}


@pytest.mark.parametrize("printer", PRINTERS)
@given(text=TEXTS)
def test_a_row_is_one_line_for_every_reader(printer: str, text: str) -> None:
    """Each printer's row holds the text and none of the separators."""
    row = PRINTERS[printer](text).decode()
    assert row.endswith("\n")
    assert row.splitlines() == [row[:-1]]
    assert json.dumps(text)[1:-1] in json.dumps(json.loads(row))


@given(text=TEXTS)
def test_a_reused_row_equals_the_computed_one(text: str) -> None:
    """A row has the same bytes when its reply was stored with or without escapes."""
    row = print_reply(line_of(text), 200, {text: text})
    for body in (reply_body(row)[1], to_json({text: text})):
        assert print_cached(line_of(text), body) == row


@given(text=TEXTS)
def test_an_event_of_a_stream_is_one_line(text: str) -> None:
    """httpx's `iter_lines` yields the whole chunk."""
    first, *rest = format_event({"text": text}).decode().splitlines()
    assert json.loads(first.removeprefix("data: ")) == {"text": text}
    assert rest == [""]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_a_printed_object_is_one_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """`--json` prints a batch, or a row of a running one, on one line."""
    print_json({"name": text})
    [printed] = capsys.readouterr().out.splitlines()
    assert json.loads(printed) == {"name": text}


def test_the_output_of_a_run_has_a_line_per_row(
    run: Runner, write_input: Callable[..., Path], tmp_path: Path
) -> None:
    """Computed, reused and failed rows, of a first run and of a resumed one, are read whole."""
    name = f"id{SEPARATORS}é"
    source = write_input(
        line(name, temperature=0, say=f"a{SEPARATORS}b"), line(name + "2", status=400)
    )
    lines = []
    for number, more in enumerate([(), (), ("--dialect", "vllm")]):
        out = tmp_path / f"out-{number}.jsonl"
        run("-i", source, "-o", out, "--reuse", tmp_path / "kept", "--any-model", *more)
        lines.append(out.read_text(encoding="utf-8").splitlines())
    first, second, third = ([json.loads(row) for row in each] for each in lines)
    assert [row["custom_id"] for row in first] == [name, name + "2"]
    assert first[0]["response"]["body"]["text"] == f"a{SEPARATORS}b"
    assert first == second
    assert third[0] == first[0]
