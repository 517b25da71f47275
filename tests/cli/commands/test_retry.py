"""Tests of `tidemill retry`: lines of a batch or a file that did not succeed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.api_rig import Shell, line
from tests.cli.fake_api import row_of
from tidemill.cli.commands.retry import expand_rows
from tidemill.cli.main import main, parse
from tidemill.offline.arguments.typed_flags import repeated_flags, without_flag
from tidemill.offline.console.errors import Refused
from tidemill.offline.run.run_flags import options_from

LINES = [line("a"), line("b", fail="busy"), line("c"), line("d", fail="`n` is 4")]


def ended(shell: Shell, *lines: dict[str, Any], flags: str = "") -> str:
    """Return the id of a batch of these lines that has ended."""
    batch_id = shell.type("submit", shell.file(*lines), *flags.split()).out.strip()
    shell.type("status", batch_id, "--watch")
    return batch_id


def content(shell: Shell, batch_id: str) -> list[Any]:
    """Return the lines of a batch's input."""
    data = shell.api.files[shell.api.batches[batch_id]["input_file_id"]]
    return [json.loads(each) for each in data.splitlines()]


def test_lines_that_failed_make_a_new_batch(shell: Shell) -> None:
    """The lines keep their order, and the batch keeps endpoint, window and metadata."""
    old = ended(shell, *LINES, flags="--window 2h --metadata team=search")
    result = shell.type("retry", old)
    new = result.out.strip()
    assert (result.status, new != old) == (0, True)
    assert f"retrying 2 of 4 lines of {old}" in result.err
    assert content(shell, new) == [LINES[1], LINES[3]]
    request = shell.api.batches[new]["request"]
    assert request.pop("input_file_id") != shell.api.batches[old]["input_file_id"]
    assert request == {
        "endpoint": "/v1/completions",
        "completion_window": "2h",
        "metadata": {"team": "search", "retry_of": old},
    }
    again = ended(shell, LINES[1], flags="--metadata retry_of=x")
    result = shell.type("retry", again, "--window", "3h", "--metadata", "team=a", "--json")
    request = result.values[0]["request"]
    assert request["metadata"] == {"team": "a", "retry_of": again}
    assert request["completion_window"] == "3h"


def test_invalid_requests_are_retried_only_on_request(shell: Shell) -> None:
    """A request that failed with status 400 would fail again, also in a batch without all rows."""
    old = ended(shell, *LINES)
    batch = shell.api.batches[old]
    invalid = {"status_code": 400, "request_id": "r", "body": {"error": {"message": "`n` is 4"}}}
    row = json.dumps({"custom_id": "d", "response": invalid, "error": None}).encode() + b"\n"
    shell.api.files[batch["error_file_id"]] = row_of(LINES[1]) + row
    result = shell.type("retry", old)
    assert f"note: omitted 1 request of {old} that is invalid" in result.err
    assert content(shell, result.out.strip()) == [LINES[1]]
    assert content(shell, shell.type("retry", old, "--include-invalid").out.strip()) == [
        LINES[1],
        LINES[3],
    ]
    batch["status"], batch["request_counts"]["completed"] = "cancelled", 1
    shell.api.files[batch["error_file_id"]] = row
    assert content(shell, shell.type("retry", old).out.strip()) == [LINES[1]]
    batch["status"], batch["request_counts"] = (
        "completed",
        {"total": 4, "completed": 3, "failed": 1},
    )
    result = shell.type("retry", old)
    assert (result.status, result.out) == (3, "")
    assert f"{old} has no requests to retry" in result.err


def test_lines_that_were_not_run_are_retried_too(shell: Shell) -> None:
    """A cancelled batch has lines without rows; only successful ones are omitted."""
    old = ended(shell, *LINES, line("e"))
    batch = shell.api.batches[old]
    batch["status"], batch["request_counts"]["completed"] = "cancelled", 1
    shell.api.files[batch["output_file_id"]] = row_of(LINES[2])
    assert [each["custom_id"] for each in content(shell, shell.type("retry", old).out.strip())] == [
        *"abde"
    ]
    batch["output_file_id"] = batch["error_file_id"] = None
    assert len(content(shell, shell.type("retry", old).out.strip())) == 5


def test_waiting_ends_with_the_new_rows(shell: Shell) -> None:
    """They are written to new files; rows of the old batch are not touched."""
    old = ended(shell, *LINES)
    result = shell.type("retry", "@last", "--wait")
    assert result.status == 3
    assert Path(f"{old}.retry.errors.jsonl").read_bytes() == row_of(LINES[1]) + row_of(LINES[3])


def test_the_server_selects_and_edits_the_requests(shell: Shell) -> None:
    """Nothing is downloaded or uploaded; options and edits are fields of the request."""
    old = ended(shell, *LINES)
    shell.api.retry_error, num_requests = None, len(shell.api.requests)
    flags = ("--body", '{"max_tokens": 9}', "--include-invalid", "--window", "3h")
    result = shell.type("retry", old, *flags)
    new = result.out.strip()
    assert shell.api.batches[new]["request"]["retry"] == {
        "completion_window": "3h",
        "body": {"max_tokens": 9},
        "include_invalid": True,
    }
    paths = [path for _, path in shell.api.requests[num_requests:]]
    assert not any("files" in path for path in paths)
    error = {"message": "1 of 1 failed for good.", "code": "nothing_to_retry"}
    shell.api.retry_error = (400, {"error": error})
    result = shell.type("retry", old)
    assert (result.status, result.out) == (3, "")
    assert f"{old} has no requests to retry: " in result.err
    assert "1 of 1 failed for good." in result.err


def test_edits_need_a_server_that_makes_them(shell: Shell) -> None:
    """A server without the route, or a file of rows, is refused with the flags."""
    old = ended(shell, *LINES)
    result = shell.type("retry", old, "--body", '{"max_tokens": 9}')
    assert (result.status, result.out) == (1, "")
    assert "omit --body and --prompt" in result.err
    result = shell.type("retry", "x.jsonl", "-o", "y.jsonl", "--body", "{}")
    assert "--body and --prompt need a batch's ID" in result.err
    assert "must be a JSON object" in shell.type("retry", old, "--body", "[]").err


def test_malformed_lines_are_omitted(shell: Shell) -> None:
    """They would fail again."""
    old = ended(shell, *LINES)
    file_id = shell.api.batches[old]["input_file_id"]
    packed = gzip.compress(shell.api.files[file_id] + b'{"custom_id": "b"}\nnot JSON')
    shell.api.files[file_id] = packed
    result = shell.type("retry", old)
    assert f"note: 2 malformed lines of {old} cannot be retried" in result.err
    assert content(shell, result.out.strip()) == [LINES[1], LINES[3]]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"status": "in_progress"}, 1, "can be retried once it has ended"),
        ({"tidemill": {"erasing_at": 5}}, 1, "was erased"),
        (
            {
                "status": "failed",
                "output_file_id": None,
                "error_file_id": None,
                "errors": {"data": [{"message": "no \x1b JSON", "line": 2}]},
            },
            1,
            "failed as a whole (line 2: no � JSON): correct its file",
        ),
        ({"input_file_id": "file-gone"}, 1, "no longer exists (file-gone)"),
        (
            {"request_counts": {"total": 4, "completed": 4, "failed": 0}},
            0,
            "has no requests to retry",
        ),
    ],
)
def test_a_batch_without_lines_to_retry_is_reported_in_a_sentence(
    fields: dict[str, Any], status: int, words: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch runs, is gone, or has no failures; no new batch is created."""
    old = ended(shell, *LINES)
    shell.api.batches[old] |= fields
    monkeypatch.setattr(shell.api, "advance", lambda _: None)
    result = shell.type("retry", old)
    assert (result.status, result.out) == (status, "")
    assert words in result.err
    assert len(shell.api.batches) == 1


def test_rows_in_a_file_are_a_run_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input is found by its name, as is the file of errors; all flags of run may follow."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.jsonl.gz", "x.output.jsonl", "y.jsonl", "rows.jsonl"):
        Path(name).touch()
    request = "-o x.output.jsonl --resume --retry-failed --model m --seed 1"
    found = parse("retry x.output.jsonl --model m --seed 1".split())
    assert options_from(found) == options_from(parse(f"run -i x.jsonl.gz {request}".split()))
    assert "running `tidemill run -i x.jsonl.gz -o x.output.jsonl" in capsys.readouterr().err
    Path("x.errors.jsonl").touch()
    found = parse("retry x.output.jsonl -i y.jsonl --model m --seed 1".split())
    wanted = parse(f"run -i y.jsonl -e x.errors.jsonl {request}".split())
    assert options_from(found) == options_from(wanted)
    for typed, words in (
        ("rows.jsonl", "are not next to it: pass their file with -i"),
        ("gone.jsonl", "gone.jsonl does not exist"),
        ("x.output.jsonl.gz -i y.jsonl", "does not exist"),
        ("rows.jsonl.gz", "does not exist"),
    ):
        with pytest.raises(Refused, match=words):
            parse(["retry", *typed.split()])
    Path("x.jsonl").touch()
    with pytest.raises(Refused, match=r"x\.jsonl and x\.jsonl\.gz may be the requests"):
        parse(["retry", "x.output.jsonl"])


def test_the_flags_of_the_run_card_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of the card, or a file next to the output, and the shard that the rows are of."""
    monkeypatch.chdir(tmp_path)
    typed = "run x.jsonl -q fp8 --retry-failed -ox --seed=1 -i a --input-file=a --shard 1/2 --force"
    flags = repeated_flags(typed.split(), ["x.jsonl"])
    assert flags == ("-q", "fp8", "--seed=1", "--shard", "1/2")
    card = {"output": "rows.jsonl.1-of-2", "input": "gone/x.jsonl", "flags": flags}
    Path("rows.jsonl.1-of-2.card.json").write_text(json.dumps(card), encoding="utf-8")
    for name in ("x.jsonl", "rows.jsonl.1-of-2"):
        Path(name).touch()
    found = expand_rows(["retry", "rows.jsonl.1-of-2", "--seed", "2"])
    again = "run -i x.jsonl -o rows.jsonl --resume --retry-failed -q fp8 --shard 1/2 --seed 2"
    assert found == again.split()
    names = ("--served-model-name", "a", "b", "--seed", "-1", "--no-plan")
    assert without_flag(names, "--served-model-name") == ["--seed", "-1", "--no-plan"]
    assert without_flag(names, "--seed") == [*names[:3], "--no-plan"]
    assert repeated_flags("run --system a --prompt b a".split(), ["a"]) == tuple(
        "--system a --prompt b".split()
    )


def test_requests_without_a_good_row_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte; rows of one id go with its lines in their order."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{json.dumps(each)} \r".encode() for each in (*LINES, LINES[0], line("e"))]
    Path("x.jsonl").write_bytes(b"\n\n".join([*lines, b"torn"]))
    bad = {**json.loads(row_of(LINES[0])), "response": {"status_code": 500}}
    rows = [*map(row_of, LINES[::-1]), json.dumps(bad).encode()]
    Path("x.output.jsonl").write_bytes(b"".join(rows))
    assert main(["retry", "x.output.jsonl", "-o", "failed.jsonl"]) == 0
    stderr = capsys.readouterr().err
    assert "note: omitted 1 malformed line of x.jsonl" in stderr
    assert "4 of 7 requests did not succeed: failed.jsonl" in stderr
    failed = b"".join(lines[place] + b"\n" for place in (1, 3, 4, 5))
    assert Path("failed.jsonl").read_bytes() == failed
    for output, words in (("failed.jsonl", "already exists"), ("x.jsonl", "same file")):
        assert main(["retry", "x.output.jsonl", "-o", output]) == 2
        assert words in capsys.readouterr().err
    assert main(["retry", "x.output.jsonl", "-i", "x.jsonl", "-o", "-"]) == 0
    assert capsys.readouterr().out.encode() == failed
