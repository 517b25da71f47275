"""Tests of `tidemill check` for outputs: rows of any program are counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from tests.cli.api_rig import Shell
from tidemill.cli.main import main

CUT_OFF = (
    "reached their token limit (finish reason `length`): raise max_tokens (max_output_tokens in"
    " responses)"
)
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def row(*finish_reasons: str, **fields: Any) -> dict[str, Any]:
    """Return a row whose choices have these finish reasons."""
    choices = [{"message": {"content": "x"}, "finish_reason": each} for each in finish_reasons]
    response = {"status_code": 200, "request_id": "r", "body": {"choices": choices}}
    return {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None, **fields}


FAILED = row(response=None, error={"code": "batch_expired", "message": "It was not run."})
ROWS = [row("stop"), row("length"), row("stop", "length"), FAILED, row("tool_calls")]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows, compressed for a `.gz` name, and return the path."""
    data = "".join(json.dumps(each) + "\n" for each in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_an_output_is_counted(shell: Shell, name: str) -> None:
    """Truncated answers and failures are counted separately, and the exit status is 1."""
    result = shell.type("check", write(shell.folder / name, ROWS))
    assert result.status == 1
    assert result.out.splitlines() == [
        "rows      5",
        "ok        4",
        "failed    1",
        f"truncated 2 of the successful rows {CUT_OFF}",
        "  1 × It was not run. (row 4)",
    ]
    [value] = shell.type("check", str(shell.folder / name), "--json").values
    assert {name: value[name] for name in ("rows", "ok", "truncated", "failed")} == {
        "rows": 5,
        "ok": 4,
        "truncated": 2,
        "failed": 1,
    }
    assert value["finish_reasons"] == {"length": 2, "stop": 2, "tool_calls": 1}


@pytest.mark.parametrize(("rows", "status"), [(ROWS[:1], 0), (ROWS[1:2], 1), (ROWS[3:4], 1)])
def test_an_output_is_good_where_all_answers_are_complete(
    shell: Shell, rows: list[dict[str, Any]], status: int
) -> None:
    """One truncated or failed row is enough for status 1."""
    assert shell.type("check", write(shell.folder / "rows.jsonl", rows)).status == status


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table_of_results_is_counted(shell: Shell, suffix: str) -> None:
    """By its columns; a truncated row has an answer, a failed one has no usage."""
    usage: list[Any] = [USAGE, USAGE, None]
    if suffix == "csv":
        usage = [None if each is None else json.dumps(each) for each in usage]
    table = pa.table(
        {
            "id": [1, 2, 3],
            "text": ["a", "b", None],
            "finish_reason": ["stop", "length", None],
            "usage": usage,
            "error": [None, "The answer was cut off.", "busy"],
        }
    )
    path = shell.folder / f"reviews.output.{suffix}"
    pq.write_table(table, path) if suffix == "parquet" else csv.write_csv(table, path)
    result = shell.type("check", str(path))
    assert result.status == 1
    assert result.out.splitlines()[:3] == ["rows      3", "ok        2", "failed    1"]
    assert "truncated 1 of the successful rows" in result.out
    assert "  1 × busy (row 3)" in result.out


def test_a_damaged_row_of_an_output_is_named(shell: Shell) -> None:
    """It is neither ok nor failed."""
    path = Path(write(shell.folder / "rows.jsonl", ROWS[:1]))
    path.write_text(path.read_text() + "x\n" + path.read_text(), encoding="utf-8")
    result = shell.type("check", str(path))
    assert result.status == 1
    assert "row 2 of " in result.err
    assert "is not JSON" in result.err


def test_requests_are_checked_as_requests(shell: Shell) -> None:
    """A request with a field `response` is not a row."""
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}, "response": 1}
    result = shell.type("check", write(shell.folder / "in.jsonl", [request]))
    assert (result.status, "1 line" in result.out) == (0, True)


def test_a_request_whose_constraint_does_not_compile_fails_the_check(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line and the reason are named; without the compiler the way to install it is."""
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}
    bad = request | {"custom_id": "b", "body": {"prompt": "x", "regex": "[a-z"}}
    path = write(shell.folder / "in.jsonl", [request, bad])
    result = shell.type("check", path)
    assert result.status == 1
    assert "warning: 1 of 2 lines will get an error row:" in result.err
    assert (
        "'[a-z' is not a valid regular expression: unclosed character class (line 2)" in result.err
    )
    for module in ("file_check", "submission"):
        monkeypatch.setattr(f"tidemill.cli.batches.{module}.has_compiler", lambda: False)
    result = shell.type("check", path)
    assert result.status == 0
    assert "checking the constraints of 1 line needs llguidance" in result.err
    assert "[engine]" in result.err


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text\n"), ("a.jsonl", "")])
def test_an_empty_file_is_checked_as_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    """Both exit with 0, and the check warns that a deployment rejects the file."""
    source = tmp_path / name
    source.write_text(content, encoding="utf-8")
    recipe = ["--prompt", "{{ text }}"] if name.endswith(".csv") else []
    for command in ("check", "run"):
        assert main([command, str(source), *recipe]) == 0
    assert "a deployment rejects the file" in capsys.readouterr().err
