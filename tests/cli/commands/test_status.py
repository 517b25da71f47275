"""`tidemill status`: one batch in detail, or a table."""

from __future__ import annotations

import io
import os
import sys

import pytest

from tests.cli.api_rig import Shell, line, submitted
from tidemill.cli.api.objects import Batch
from tidemill.cli.batches.table import print_table


def test_one_batch_is_shown_in_detail(shell: Shell) -> None:
    """With what its file was refused for, and nothing that would move a terminal's cursor."""
    batch_id = submitted(shell)
    shell.api.batches[batch_id] |= {
        "errors": {"data": [{"code": "x", "message": "no \x1b[2Jgood", "line": 7}]},
        "metadata": {"team": "sea\nrch"},
    }
    result = shell.type("status", batch_id)
    assert result.status == 0
    assert f"id{' ' * 8}" in result.out
    assert "error: line 7: no �[2Jgood" in result.out
    assert "sea�rch" in result.out


def test_the_input_goes_by_its_name(shell: Shell) -> None:
    """Its ID follows the name; a deleted file only has its ID."""
    batch_id = submitted(shell)
    input_id = shell.api.batches[batch_id]["input_file_id"]
    assert f"{input_id}.jsonl ({input_id})" in shell.type("status", batch_id).out
    del shell.api.files[input_id]
    result = shell.type("status", batch_id)
    assert result.status == 0
    assert f"  {input_id}\n" in result.out


def test_reasons_of_failures_are_shown(shell: Shell) -> None:
    """Each kind of error is shown once, during the batch and after its end."""
    batch_id = submitted(shell, "a", "b", "c", fail="Too hot.")
    batch = shell.api.batches[batch_id]
    shell.type("resume", batch_id)
    assert batch["error_file_id"] is not None
    result = shell.type("status", batch_id)
    assert "why 1 row failed:\n  1 × Too hot." in result.out
    del shell.api.files[batch["error_file_id"]]
    assert "why" not in shell.type("status", batch_id).out


def test_a_rejected_batch_shows_its_error_in_the_table(shell: Shell) -> None:
    """The table contains the first error and the number of others."""
    batch_id = submitted(shell)
    errors = [{"code": "x", "message": f"It is no\x1b JSON {n}.", "line": n} for n in (3, 9)]
    shell.api.batches[batch_id] |= {"status": "failed", "errors": {"data": errors}}
    assert "line 3: It is no� JSON 3. (and 1 more)" in shell.type("status").out


def test_unknown_parameters_of_a_batch_are_shown(shell: Shell) -> None:
    """They are shown during the batch and at its end."""
    batch_id = submitted(shell, "a")
    unknown = {"name": "topp", "url": "/v1/completions", "count": 1, "first_line": 4}
    more = {"suggestion": "top_p", "new": 1}
    shell.api.batches[batch_id]["tidemill"] = {"unknown_parameters": [unknown | more]}
    words = (
        "`topp` in 1 line (line 4) is not a parameter of /v1/completions; did you mean `top_p`?\n"
    )
    assert f"warning: {words}" in shell.type("status", batch_id).out
    assert f"warning: {words}" in shell.type("resume", batch_id).err


@pytest.mark.parametrize("status", ["in_progress", "completed"])
def test_truncated_answers_are_counted(shell: Shell, status: str) -> None:
    """In the table, in detail, and where a batch is waited for; nothing where there are none."""
    batch_id = submitted(shell, "a")
    assert "truncated" not in shell.type("status").out + shell.type("status", batch_id).out
    shell.api.batches[batch_id]["tidemill"] = {"truncated_rows": 1_200}
    shell.api.batches[batch_id]["status"] = status
    assert "1,200 truncated" in shell.type("status").out
    words = "1,200 of the successful rows (finish reason `length`)"
    assert words in shell.type("status", batch_id).out
    if status == "completed":
        assert "0 failed, 1,200 truncated" in shell.type("resume", batch_id).err


def test_a_waiting_batch_shows_the_reason_in_table_and_details(shell: Shell) -> None:
    """The details contain a sentence, the table a code."""
    batch_id = submitted(shell)
    waiting = {"code": "no_capacity", "message": "No machine \x1b[2Jcan be had.", "since": 7}
    shell.api.batches[batch_id]["tidemill"] = {"waiting": waiting}
    shell.api.batches[batch_id]["status"] = "in_progress"
    assert "waits: no_capacity" in shell.type("status").out
    assert "since 1970-01-01 00:00:07 UTC: No machine" in shell.type("status", batch_id).out


def test_the_newest_batches_are_a_table(shell: Shell) -> None:
    """The requested number is listed, over several pages if necessary."""
    for number in range(3):
        submitted(shell, str(number))
    assert len(shell.type("status").out.splitlines()) == 4
    result = shell.type("status", "--limit", "2", "--json")
    ids = list(shell.api.batches)
    assert [value["id"] for value in result.values] == [ids[2], ids[1]]


def test_all_batches_are_listed_over_pages(shell: Shell) -> None:
    """Each once."""
    file = shell.file(line("a"))
    shell.type("submit", file)
    [batch] = shell.api.batches.values()
    for number in range(249):
        shell.api.batches[f"batch_{number}"] = batch | {"id": f"batch_{number}"}
    result = shell.type("status", "--all", "--json")
    assert len({value["id"] for value in result.values}) == 250
    assert shell.api.count("GET", "/v1/batches$") == 3


def test_no_batch_is_a_sentence(shell: Shell) -> None:
    """Nothing is printed on standard output."""
    result = shell.type("status")
    assert (result.status, result.out) == (0, "")
    assert "there are no batches" in result.err


def test_watching_one_batch_ends_with_its_outcome(shell: Shell) -> None:
    """The exit status is that of --wait, but nothing is fetched."""
    batch_id = submitted(shell, end="expired")
    result = shell.type("status", batch_id, "--watch", "--json")
    assert result.status == 5
    assert [value["status"] for value in result.values] == ["in_progress", "expired"]


def test_a_watched_table_is_for_people(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on until a signal comes; programs watch one batch."""
    assert shell.type("status", "--watch", "--json").status == 2
    submitted(shell)

    def stop(_: float) -> None:
        os.kill(os.getpid(), 2)

    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", stop)
    assert shell.type("status", "--watch").status == 130


def test_the_table_names_the_files(shell: Shell) -> None:
    """An upload by its name, a drop by its key, and a file that is gone by its id."""
    for number in range(3):
        submitted(shell, str(number))
    first, dropped, gone = shell.api.batches.values()
    dropped["input_file_id"] = "s3://bucket/input/nightly/a-b.jsonl"
    gone["input_file_id"] = "file-gone"
    heads, *rows = (row.split() for row in shell.type("status").out.splitlines())
    assert heads[:3] == ["ID", "FILE", "STATUS"]
    names = [row[1] for row in rows]
    assert names == ["file-gone", "nightly/a-b.jsonl", f"{first['input_file_id']}.jsonl"]


def test_a_batch_is_found_by_the_beginning_of_its_id_or_as_the_last(shell: Shell) -> None:
    """The prefix `batch_` is optional; an ambiguous beginning is refused."""
    for number in range(2):
        submitted(shell, str(number))
    batch = shell.api.batches.popitem()[1]
    shell.api.batches["batch_abc1"] = batch | {"id": "batch_abc1"}
    shell.api.batches["batch_abc2"] = batch | {"id": "batch_abc2"}
    for name, found in (
        ("@last", "batch_abc2"),
        ("batch_abc1", "batch_abc1"),
        ("abc2", "batch_abc2"),
    ):
        assert shell.type("status", name, "--json").values[0]["id"] == found
    result = shell.type("status", "abc")
    assert result.status == 1
    assert (
        "2 batches start with batch_abc: batch_abc2, batch_abc1. Give more characters" in result.err
    )
    assert shell.type("status", "xyz").status == 1
    assert shell.type("cancel", "@last", "--json").values[0]["id"] == "batch_abc2"
    assert shell.type("cancel", "abc1", "--json").values[0]["id"] == "batch_abc1"


def test_there_is_no_last_batch_of_none(shell: Shell) -> None:
    """Each command with an ID reports it in a sentence."""
    for command in ("status", "results", "resume", "cancel"):
        result = shell.type(command, "@last")
        assert (result.status, result.out) == (1, "")
        assert "there are no batches" in result.err


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_a_status_has_its_colour_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_terminal: bool,
    variables: dict[str, str],
    is_coloured: bool,
) -> None:
    """No program reads escapes, and who wants no colours gets none."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    fields = {"id": "batch_1", "status": "completed", "request_counts": {"total": 1}}
    print_table([(Batch(fields), "a.jsonl")])
    stdout = sys.stdout.getvalue()
    assert ("\x1b[32mcompleted" in stdout) is is_coloured
    assert ("\x1b" in stdout) is is_coloured
