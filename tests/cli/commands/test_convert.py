"""`tidemill convert`: rows in the form of their input's vendor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tidemill.batch.file.lines import RawLine, Vendor
from tidemill.batch.file.rows import row_id_of
from tidemill.batch.file.vendor_lines import request_line
from tidemill.batch.file.vendor_rows import vendor_row
from tidemill.cli.main import main

MESSAGES = [{"role": "user", "content": "Hi"}]
LINES: Mapping[Vendor, Callable[[str], dict[str, Any]]] = {
    "anthropic": lambda name: {"custom_id": name, "params": {"messages": MESSAGES}},
    "bedrock": lambda name: {"recordId": name, "modelInput": {"messages": MESSAGES}},
    "gemini": lambda name: {"key": name, "request": {"contents": []}},
}
BODY = {
    "id": "chatcmpl-1",
    "model": "m",
    "choices": [{"index": 0, "message": {"content": "Ho"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
ERROR = {"message": "No.", "type": "invalid_request_error", "param": None, "code": "c"}


def row_of(custom_id: str | None, status: int | None = 200, code: str = "c") -> dict[str, Any]:
    """Return a row."""
    body = BODY if status == 200 else {"error": ERROR}
    response = {"status_code": status, "request_id": "req_1", "body": body}
    error = None if status else {"code": code, "message": "Not run."}
    return {"custom_id": custom_id, "response": response if status else None, "error": error}


def write(path: Path, values: Sequence[object]) -> Path:
    """Write JSONL."""
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


EMBEDDED = {
    "custom_id": "a",
    "response": {"status_code": 200, "body": {"data": [{"embedding": [1.0]}]}},
}
EMPTY = {"custom_id": "a", "response": None, "error": None}


@pytest.mark.parametrize("vendor", LINES)
def test_rows_are_joined_in_the_order_of_the_input(
    tmp_path: Path, vendor: Vendor, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an output and an errors file, with a repeated ID and an invalid line."""
    lines = [*map(LINES[vendor], "aabc"), {"x": 1}]
    rows = [row_of("a", 400), row_of("a"), row_of("b", 400), row_of("c"), row_of(None, None)]
    for number, row in enumerate(rows[:2], 1):
        raw = RawLine(number, json.dumps(lines[number - 1]).encode())
        row["id"] = row_id_of(RawLine(number, request_line(vendor, raw)).digest)
    source = write(tmp_path / "in.jsonl", lines)
    output = write(tmp_path / "output.jsonl", rows[1:4:2])
    errors = write(tmp_path / "errors.jsonl", rows[::2])
    given = [str(output), str(errors), "-i", str(source)]
    assert main(["convert", *given, "-o", str(tmp_path / "out.jsonl")]) == 0
    text = (tmp_path / "out.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert found == [vendor_row(vendor, *pair) for pair in zip(lines, rows, strict=True)]
    assert "5 rows in" in capsys.readouterr().err
    assert main(["convert", *given]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("lines", "rows", "words"),
    [
        ([LINES["bedrock"]("a")], [], "line 1 of in.jsonl (a) has no row in rows.jsonl"),
        ([LINES["bedrock"]("a")], [row_of("a"), row_of("b")], "has a row (b) of no line of in"),
        ([{"custom_id": "a", "url": "/x", "body": {}}], [row_of("a")], "whose rows have OpenAI's"),
        ([{"custom_id": "a", "body": {}}], [row_of("a")], "contains requests without `url`"),
        ([LINES["anthropic"]("a")], [EMBEDDED], "row 1 of rows.jsonl is not an answer to its"),
        ([LINES["gemini"]("a")], [EMPTY], "row 1 of rows.jsonl is not an answer to its request"),
        ([LINES["bedrock"]("a")], [{"x": 1}], "row 1 of rows.jsonl is not a row"),
    ],
)
def test_rows_that_are_not_those_of_the_input_are_refused(  # noqa: PLR0917 - fixtures and cases
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[object],
    rows: list[object],
    words: str,
) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), lines)
    write(Path("rows.jsonl"), rows)
    assert main(["convert", "rows.jsonl", "-i", "in.jsonl", "-o", "out.jsonl"]) == 1
    assert words in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_a_repeated_id_without_ids_of_rows_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Either row may be that of the first line."""
    source = write(tmp_path / "in.jsonl", [*map(LINES["bedrock"], "aa")])
    names = [str(write(tmp_path / f"{code}.jsonl", [row_of("a", code)])) for code in (200, 400)]
    assert main(["convert", *names, "-i", str(source)]) == 1
    assert "has a row in each of" in capsys.readouterr().err


def test_each_vendors_rows() -> None:
    """Successes, failures of a request, and lines that never ran."""
    [anthropic, bedrock, gemini] = [LINES[vendor]("a") for vendor in LINES]
    succeeded = vendor_row("anthropic", anthropic, row_of("a"))
    assert succeeded["custom_id"] == "a"
    assert succeeded["result"]["type"] == "succeeded"
    assert succeeded["result"]["message"]["content"] == [{"type": "text", "text": "Ho"}]
    assert vendor_row("anthropic", anthropic, row_of("a", 400))["result"] == {
        "type": "errored",
        "error": {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "No."},
            "request_id": "req_1",
        },
    }
    for code, kind in (("batch_expired", "expired"), ("batch_cancelled", "canceled")):
        found = vendor_row("anthropic", anthropic, row_of("a", None, code))
        assert found["result"] == {"type": kind}
    assert vendor_row("bedrock", bedrock, row_of("a")) == {**bedrock, "modelOutput": BODY}
    assert vendor_row("bedrock", bedrock, row_of("a", None, "invalid_json_line")) == {
        **bedrock,
        "error": {"errorCode": 400, "errorMessage": "Not run."},
    }
    given = {"recordId": "a", "modelInput": {"anthropic_version": "v"}}
    assert vendor_row("bedrock", given, row_of("a"))["modelOutput"]["type"] == "message"
    converse = {"recordId": "a", "modelInput": {"messages": MESSAGES, "inferenceConfig": {}}}
    error = vendor_row("bedrock", converse, row_of("a", 400))["error"]
    assert error == {"errorCode": 400, "errorMessage": "No."}
    titan = row_of("a")
    titan["response"]["body"] = {"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": 3}}
    given = {"recordId": "a", "modelInput": {"inputText": "Hi"}}
    output = vendor_row("bedrock", given, titan)["modelOutput"]
    assert output == {"embedding": [1.0], "inputTextTokenCount": 3}
    titan["response"]["body"] = {**BODY, "choices": [{"text": "Ho", "finish_reason": "length"}]}
    given["modelInput"]["textGenerationConfig"] = {}
    output = vendor_row("bedrock", given, titan)["modelOutput"]
    assert output == {
        "inputTextTokenCount": 5,
        "results": [{"tokenCount": 2, "outputText": "Ho", "completionReason": "LENGTH"}],
    }
    answer = vendor_row("gemini", gemini, row_of("a"))
    assert (answer["key"], answer["response"]["modelVersion"]) == ("a", "m")
    error = {"code": 13, "message": "Not run."}
    assert vendor_row("gemini", gemini, row_of("a", None)) == {"key": "a", "error": error}
    of_vertex = vendor_row("gemini", {"request": {}}, row_of("1"))
    assert of_vertex.keys() == {"request", "status", "response"}
