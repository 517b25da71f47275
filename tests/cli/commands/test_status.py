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
    said = shell.type("status", batch_id)
    assert said.status == 0
    assert f"id{' ' * 8}" in said.out
    assert "error: line 7: no �[2Jgood" in said.out
    assert "sea�rch" in said.out


def test_the_input_goes_by_its_name(shell: Shell) -> None:
    """With its id behind it; by its id alone when it is gone."""
    batch_id = submitted(shell)
    input_id = shell.api.batches[batch_id]["input_file_id"]
    assert f"{input_id}.jsonl ({input_id})" in shell.type("status", batch_id).out
    del shell.api.files[input_id]
    said = shell.type("status", batch_id)
    assert said.status == 0
    assert f"  {input_id}\n" in said.out


def test_why_rows_failed_is_told(shell: Shell) -> None:
    """Errors of one kind once, while the batch runs and when it has ended."""
    batch_id = submitted(shell, "a", "b", "c", fail="Too hot.")
    batch = shell.api.batches[batch_id]
    shell.type("resume", batch_id)
    assert batch["error_file_id"] is not None
    said = shell.type("status", batch_id)
    assert "why 1 row failed:\n  1 × Too hot." in said.out
    del shell.api.files[batch["error_file_id"]]
    assert "why" not in shell.type("status", batch_id).out


def test_a_refused_batch_tells_why_in_the_table(shell: Shell) -> None:
    """By its first error, and how many more there are."""
    batch_id = submitted(shell)
    errors = [{"code": "x", "message": f"It is no\x1b JSON {n}.", "line": n} for n in (3, 9)]
    shell.api.batches[batch_id] |= {"status": "failed", "errors": {"data": errors}}
    assert "line 3: It is no� JSON 3. (and 1 more)" in shell.type("status").out


def test_unknown_parameters_of_a_batch_are_told(shell: Shell) -> None:
    """While it runs and at its end."""
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
    words = "1,200 of the rows that are ok (finish reason `length`)"
    assert words in shell.type("status", batch_id).out
    if status == "completed":
        assert "0 failed, 1,200 truncated" in shell.type("resume", batch_id).err


def test_a_batch_that_waits_tells_why(shell: Shell) -> None:
    """In detail by a sentence, in the table by a word."""
    batch_id = submitted(shell)
    waiting = {"code": "no_capacity", "message": "No machine \x1b[2Jcan be had.", "since": 7}
    shell.api.batches[batch_id]["tidemill"] = {"waiting": waiting}
    shell.api.batches[batch_id]["status"] = "in_progress"
    assert "waits: no_capacity" in shell.type("status").out
    assert "since 1970-01-01 00:00:07 UTC: No machine" in shell.type("status", batch_id).out


def test_the_newest_batches_are_a_table(shell: Shell) -> None:
    """As many as were asked for, over as many pages as that takes."""
    for number in range(3):
        submitted(shell, str(number))
    assert len(shell.type("status").out.splitlines()) == 4
    said = shell.type("status", "--limit", "2", "--json")
    ids = list(shell.api.batches)
    assert [value["id"] for value in said.values] == [ids[2], ids[1]]


def test_all_batches_are_listed_over_pages(shell: Shell) -> None:
    """Each once."""
    file = shell.file(line("a"))
    shell.type("submit", file)
    [batch] = shell.api.batches.values()
    for number in range(249):
        shell.api.batches[f"batch_{number}"] = batch | {"id": f"batch_{number}"}
    said = shell.type("status", "--all", "--json")
    assert len({value["id"] for value in said.values}) == 250
    assert shell.api.count("GET", "/v1/batches$") == 3


def test_no_batch_is_a_sentence(shell: Shell) -> None:
    """And nothing on standard output."""
    said = shell.type("status")
    assert (said.status, said.out) == (0, "")
    assert "there are no batches" in said.err


def test_watching_one_batch_ends_with_its_outcome(shell: Shell) -> None:
    """As waiting for it does, without fetching anything."""
    batch_id = submitted(shell, end="expired")
    said = shell.type("status", batch_id, "--watch", "--json")
    assert said.status == 5
    assert [value["status"] for value in said.values] == ["in_progress", "expired"]


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
    """With and without what all ids begin with; what several begin with is a question."""
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
    said = shell.type("status", "abc")
    assert said.status == 1
    assert "2 batches begin with batch_abc: batch_abc2, batch_abc1; say more of it" in said.err
    assert shell.type("status", "xyz").status == 1
    assert shell.type("cancel", "@last", "--json").values[0]["id"] == "batch_abc2"
    assert shell.type("cancel", "abc1", "--json").values[0]["id"] == "batch_abc1"


def test_there_is_no_last_batch_of_none(shell: Shell) -> None:
    """A sentence, for each command that takes an id."""
    for command in ("status", "results", "resume", "cancel"):
        said = shell.type(command, "@last")
        assert (said.status, said.out) == (1, "")
        assert "there are no batches" in said.err


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
    said = sys.stdout.getvalue()
    assert ("\x1b[32mcompleted" in said) is is_coloured
    assert ("\x1b" in said) is is_coloured
