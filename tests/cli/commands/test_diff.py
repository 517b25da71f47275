"""`tidemill diff`: two outputs, compared."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tidemill.cli.main import main


class Result(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def fields(self) -> Any:
        """Return the JSON object of standard output."""
        return json.loads(self.out)


def row(custom_id: str | None, text: str, tokens: int = 1, end: str = "stop") -> dict[str, Any]:
    """Return a row with an answer."""
    choice = {"index": 0, "message": {"content": text}, "finish_reason": end}
    body = {"id": f"x{text}", "choices": [choice], "usage": {"completion_tokens": tokens}}
    return row_of(custom_id, {"status_code": 200, "request_id": "r", "body": body}, None)


def row_of(custom_id: str | None, response: object, error: object) -> dict[str, Any]:
    """Return any row."""
    return {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": error}


def failed(custom_id: str, message: str) -> dict[str, Any]:
    """Return an error row."""
    body = {"error": {"message": message, "code": None}}
    return row_of(custom_id, {"status_code": 400, "request_id": "r", "body": body}, None)


Diff = Callable[..., Result]


@pytest.fixture(name="diff")
def fixture_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Diff:
    """Return a function that compares two outputs: rows, or the bytes of a file."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: list[Any] | bytes) -> str:
        if isinstance(content, list):
            content = "".join(f"{json.dumps(each)}\n" for each in content).encode()
        Path(name).write_bytes(content)
        return name

    def compare(a: list[Any] | bytes, b: list[Any] | bytes, *flags: str) -> Result:
        status = main(["diff", write("a.jsonl", a), write("b.jsonl", b), *flags])
        return Result(status, *capsys.readouterr())

    return compare


A = [
    row("1", "one", 2),
    row("2", "two", 4),
    row("3", "three"),
    failed("4", "`n` is 4"),
    row("5", ""),
]
B = [
    row("6", "six"),
    row("3", "thrEE", 9, "length"),
    row("4", "four"),
    row("2", "two", 4),
    failed("1", "busy 1"),
]


def test_rows_are_compared_by_custom_id_in_any_order(diff: Diff) -> None:
    """Answers, their lengths and ends, errors by kind, and the rows that only one file has."""
    found = diff(A, B, "--json").fields
    assert (found["both"], found["answered_in_both"], found["identical"]) == (4, 2, 1)
    assert (found["agreement"], found["b_is_longer"], found["b_is_shorter"]) == (0.5, 1, 0)
    assert (found["failed_in_a_alone"], found["failed_in_b_alone"]) == (1, 1)
    assert (found["a"]["only_here_ids"], found["b"]["only_here_ids"]) == (["5"], ["6"])
    assert found["a"]["errors"] == [{"message": "`n` is 4", "count": 1, "custom_ids": ["4"]}]
    assert found["b"]["finish_reasons"] == {"length": 1, "stop": 3}
    assert (found["a"]["mean_completion_tokens"], found["a"]["median_completion_tokens"]) == (
        2,
        1.5,
    )
    assert [each["custom_id"] for each in found["first"]] == ["1", "3", "4"]
    assert found["first"][0] | {"error_b": "busy 1", "row_b": 5} == found["first"][0]
    changed = {"custom_id": "3", "choice": 0, "character": 3, "a": "three", "b": "thrEE"}
    assert found["first"][1] == changed | {"row_a": 3, "row_b": 2}


TABLE = """\
review_id,text,output_text,finish_reason,usage,error
a,x,two,stop,"{""completion_tokens"":4}",
b,"x
y",1,length,"{""completion_tokens"":1}",The answer is cut off
c,,,,,Row 3: column `text` is null
"""


def test_tables_of_results_are_compared_as_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table has the number of a row or a column as its id; a cut-off answer is one."""
    monkeypatch.chdir(tmp_path)
    table, lines = tmp_path / "a.csv", tmp_path / "b.ndjson"
    table.write_text(TABLE, encoding="utf-8")
    answered = [row("1", "two", 4), row("2", "one", 2), failed("3", "busy")]
    files = "".join(f"{json.dumps(each)}\n" for each in answered)
    (tmp_path / "rows.jsonl").write_text(files, encoding="utf-8")
    assert main(["diff", str(table), "rows.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["both"], found["identical"], found["differing"]) == (3, 1, 1)
    assert (found["failed_in_both"], found["a"]["mean_completion_tokens"]) == (1, 2.5)
    assert found["first"][0] | {"custom_id": "2", "a": "1", "b": "one"} == found["first"][0]
    names = ("review_id", "text", "finish_reason", "usage", "error")
    cells = [("b", "1", "length", {"completion_tokens": 1}, "cut off"), ("z", None, None, None, "")]
    rows = "".join(f"{json.dumps(dict(zip(names, each, strict=True)))}\n" for each in cells)
    lines.write_text(rows, encoding="utf-8")
    assert main(["diff", str(table), str(lines), "--json", "--id", "review_id"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["both"], found["identical"]) == (1, 1)
    assert (found["a"]["only_here_ids"], found["b"]["only_here_ids"]) == (["a", "c"], ["z"])
    assert main(["diff", str(table), str(lines), "--id", "number"]) == 2
    assert "has no column `number` for --id: it has review_id, text" in capsys.readouterr().err
    table.write_text("a,b\n1,2\n", encoding="utf-8")
    assert main(["diff", str(table), str(lines)]) == 1
    assert "has no result columns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "cell", "body"),
    [
        ("embedding", "[0.5, 1.0]", {"data": [{"index": 0, "embedding": [0.5, 1.0]}]}),
        ("scores", "[0.5, 1.0]", {"data": [{"score": 0.5}, {"score": 1.0}]}),
        (
            "results",
            '[{"index": 0, "relevance_score": 0.5}]',
            {"results": [{"index": 0, "relevance_score": 0.5}]},
        ),
        ("text", "heard", {"text": "heard"}),
    ],
)
def test_cells_of_other_endpoints_are_answers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cell: str, body: dict[str, Any]
) -> None:
    """Vectors, scores, ranks and transcripts in CSV equal those in a file of rows."""
    monkeypatch.chdir(tmp_path)
    quoted = cell.replace('"', '""')
    table = f'q,{name},usage,error\nx,"{quoted}","{{""total_tokens"":1}}",\n'
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    other = row_of("1", {"status_code": 200, "request_id": "r", "body": body}, None)
    (tmp_path / "rows.jsonl").write_text(json.dumps(other) + "\n", encoding="utf-8")
    assert main(["diff", "a.csv", "rows.jsonl", "--exit-code"]) == 0


def test_fields_of_a_schema_are_not_answers_of_other_endpoints(tmp_path: Path) -> None:
    """They follow the usage and the error, whatever their names."""
    fields = ("scores", "probs", "embedding", "results")
    names = ",".join(("q,text,finish_reason,usage,error", *fields))
    table = f'{names}\nx,two,stop,"{{""completion_tokens"":4}}",,1,2,3,4\n'
    (a := tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (b := tmp_path / "b.jsonl").write_text(json.dumps(row("1", "two", 4)), encoding="utf-8")
    assert main(["diff", str(a), str(b), "--exit-code"]) == 0


def test_labels_that_change_are_counted(diff: Diff) -> None:
    """Two JSON answers of one value are identical, whatever their white space and order."""
    a = [row(str(n), label) for n, label in enumerate(["good", "good", "bad", '{"a": 1, "b": 2}'])]
    b = [row(str(n), label) for n, label in enumerate(["bad", "bad\n", "good", '{"b":2,"a":1}'])]
    found = diff(a, b, "--json").fields
    assert found["identical"] == 1
    assert found["changes"] == [{"a": "good", "b": "bad", "count": 2}]
    assert 'most frequent changes from a to b: "good" → "bad" 2\n' in diff(a, b).out


def test_people_read_the_same(diff: Diff) -> None:
    """`-n` says how many rows are shown."""
    result = diff(A, B, "-n", "2")
    assert result.status == 0
    assert "4 rows in both; of 2 with an answer in both, 1 are identical (50.0%)" in result.out
    assert "error in a: `n` is 4: 1 (4)" in result.out
    assert "differing rows, 2 of 3:" in result.out
    assert '3 (rows 3, 2), from character 4 on\n  a  "three"\n  b  "thrEE"\n' in result.out


@pytest.mark.parametrize(
    ("a", "b", "status"),
    [
        (A, A[::-1], 0),
        (A, A[1:], 1),
        ([row("1", "x")], [row("1", "y")], 1),
        ([row("1", "x")], [failed("1", "y")], 1),
        ([failed("1", "x")], [failed("1", "y")], 0),
        ([row("1", "x"), row("1", "y")], [row("1", "x"), row("1", "y")], 0),
        ([row("1", "x"), row("1", "y")], [row("1", "y"), row("1", "x")], 1),
        ([], [], 0),
        (b"", A, 1),
    ],
)
def test_the_exit_status_shows_a_difference_with_exit_code(
    a: list[Any], b: list[Any], status: int, diff: Diff
) -> None:
    """Errors on both sides are not a difference; rows with equal IDs are compared in order."""
    assert diff(a, b).status == 0
    assert diff(a, b, "--exit-code").status == status


def test_rows_of_other_programs_are_read(diff: Diff) -> None:
    """Either dialect, compressed, an array, blank lines, CRLF, a byte order mark, surrogates."""
    rows = [row("1", "x"), row_of("2", None, {"code": "batch_expired", "message": "late"})]
    vllm = [rows[0], row_of("2", {"status_code": 400, "body": None}, "late")]
    lines = "\r\n\n".join(map(json.dumps, rows)).encode()
    forms = [b"\xef\xbb\xbf" + lines, gzip.compress(lines), json.dumps(rows).encode(), vllm]
    for form in forms:
        found = diff(rows, form, "--json").fields
        assert (found["identical"], found["failed_in_both"], found["b"]["rows"]) == (1, 1, 2)
        assert found["a"]["errors"][0]["message"] == "late"
    lone = [row("\ud800", "a\ud83d"), row_of("odd", {"status_code": 200, "body": "text"}, None)]
    result = diff(lone, [row("\ud800", "a"), row_of("odd", None, None)])
    assert "\n� (row 1), from character 2 on\n" in result.out
    assert diff(lone, rows, "--json").fields["a"]["only_here_ids"] == ["\ud800", "odd"]


def test_a_terminal_gets_no_control_characters(diff: Diff) -> None:
    """JSON does not contain control characters either: they are escaped."""
    evil = "\x1b[2J\x9b31m\u202e\u0007\r"
    a, b = [row(evil, evil, end=evil), failed("2", evil)], [row(evil, f"{evil}."), failed(evil, "")]
    for flags in ((), ("--json",)):
        out = diff(a, b, *flags).out
        assert "31m" in out
        assert all(char.isprintable() or char == "\n" for char in out)
    assert json.loads(out)["a"]["errors"][0]["message"] == evil


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b'{"custom_id": "1"', "row 1 of b.jsonl is not JSON"),
        (b"\xff\xfe", "b.jsonl cannot be read. The file is UTF-16"),
        (b"\n[1]\n", "row 2 of b.jsonl is not a JSON object"),
        (b'{"custom_id": "1", "url": "/v1", "body": {}}', "row 1 of b.jsonl is a request"),
        (b'{"custom_id": "1", "text": ""}', "row 1 of b.jsonl is not a row of a batch output"),
        (
            b'{"custom_id": 1, "response": {}}',
            "row 1 of b.jsonl has a `custom_id` that is not a string",
        ),
        (b"[" * 100_000, "row 1 of b.jsonl is not JSON"),
    ],
)
def test_a_line_that_is_not_a_row_is_named(bad: bytes, words: str, diff: Diff) -> None:
    """The error is one sentence with the line's number."""
    result = diff(A, bad)
    assert result.status == 1
    assert result.err.startswith(f"tidemill: {words}")
    assert result.err.count("\n") == 1


def test_a_row_that_is_cut_off_is_left_out(diff: Diff) -> None:
    """The last row of a file that a run is writing may be incomplete."""
    result = diff(A, "".join(f"{json.dumps(each)}\n" for each in A).encode()[:-9], "--json")
    assert "note: skipped row 5 of b.jsonl, which is incomplete" in result.err
    assert (result.fields["b"]["rows"], result.fields["a"]["only_here_ids"]) == (4, ["5"])


def test_long_rows_and_ids_are_shown_in_part(diff: Diff) -> None:
    """Ten megabytes make a short report."""
    text = "x" * 10_000_000
    out = diff([row(text, f"{text}a")], [row(text, f"{text}b")]).out
    assert "from character 10,000,001 on" in out
    assert len(out) < 1000
    assert len(diff([row("1", f"{text}a")], [row("1", f"{text}b")], "--json").out) < 2000


def test_both_files_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one of the files can be standard input."""
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "a.jsonl", "b.jsonl"]) == 2
    assert main(["diff", "-", "-"]) == 2
