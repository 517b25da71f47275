"""`tidemill view`: rows, to be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.cli.main import main
from tidemill.offline.rows.page.open_pages import open_page
from tidemill.offline.rows.page.table_page import TablePage

Type = Callable[..., tuple[str, str]]


def row(custom_id: str | None, body: dict[str, Any] | None, error: object = None) -> str:
    """Return a row."""
    response = None if body is None else {"status_code": 200, "body": body}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": error})


def chat(*texts: str) -> dict[str, Any]:
    """Return a body of a chat."""
    choices = [{"message": {"content": text}, "finish_reason": "stop"} for text in texts]
    return {"choices": choices, "usage": {"completion_tokens": 3}}


def request(custom_id: str, **body: Any) -> str:
    """Return a request."""
    return json.dumps({"custom_id": custom_id, "url": "/v1/chat/completions", "body": body})


@pytest.fixture(name="view")
def fixture_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Type:
    """Return a function that types the command in a folder with rows and requests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    rows = [
        row("a", chat("Lisbon\nit is")),
        row("b", None, {"message": "the engine was BUSY"}),
        row(None, {"data": [{"index": 0, "embedding": [0.5] * 9}]}),
        row("d\x1b[2J", chat("\x1b[31m[bold]red[/bold]\x9b\td\ud83d", "two")),
        row("long", chat("x" * 5000)),
    ]
    Path("rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    requests = ["no request", request("b", prompt="Say b."), request("a", messages=messages)]
    Path("x.jsonl").write_text("\n".join(requests), encoding="utf-8")

    def type_command(*arguments: str) -> tuple[str, str]:
        assert main(["view", "rows.jsonl", *arguments]) == 0
        output = capsys.readouterr()
        return output.out, output.err

    return type_command


def test_a_request_is_shown_next_to_its_answer(view: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown above the answer if the terminal is narrow."""
    out, err = view("-i", "x.jsonl", "-n", "2")
    head, first, second, _, error, text, *_ = out.splitlines()
    assert (head, error) == ("row 1  a  stop, 3 tokens", "row 2  b  error")
    assert first.split("  ")[0] == "system: Be brief."
    assert first.endswith("  Lisbon")
    assert second.startswith("user: What is this? [image_url] ")
    assert second.endswith("  it is")
    assert text.split() == "Say b. the engine was BUSY".split()
    assert err == "tidemill: there are more rows: print more with -n N\n"
    monkeypatch.setenv("COLUMNS", "60")
    out, _ = view("-i", "x.jsonl", "-n", "1")
    assert out.splitlines()[1:4:2] == ["system: Be brief.", "---------------"]


def test_rows_are_chosen_by_words_and_failures(view: Type) -> None:
    """Case is ignored; without matching rows the exit status is 0."""
    assert view("--errors")[0] == "row 2  b  error\nthe engine was BUSY\n\n"
    assert view("--grep", "lisBON")[0].startswith("row 1  a")
    assert view("--grep", "busy")[0] == view("--errors")[0]
    assert view("--grep", "nowhere") == ("", "tidemill: no row of rows.jsonl matches\n")


def test_a_terminal_gets_text_alone(view: Type) -> None:
    """Control characters and rich's markup are not interpreted; long texts are cut by default."""
    out, _ = view()
    assert all(char.isprintable() or char == "\n" for char in out)
    assert "[bold]red[/bold]" in out
    assert "0.5, 0.5, 0.5, 0.5, … (9 numbers)" in out
    assert "(4,000 more characters)" in out
    assert view("--full")[0].count("x") == 5000


def test_rows_of_a_table_are_read_as_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is shown with its kept columns; a file of requests is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("rows.csv").write_text(
        "id,review,text,finish_reason,usage,error\na,Great!,good,stop,,\nb,Awful,,,,BUSY\n",
        encoding="utf-8",
    )
    assert main(["view", "rows.csv"]) == 0
    first, review, answer, _, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, second) == ("row 1  a  stop", "row 2  b  error")
    assert review.split() == ["id:", "a", "good"]
    assert answer == "review: Great!"
    assert main(["view", "rows.csv", "--grep", "busy", "--errors"]) == 0
    assert capsys.readouterr().out.startswith("row 2  b  error")
    assert main(["view", "rows.csv", "-i", "rows.csv"]) == 2
    assert "contains its requests as columns: remove -i" in capsys.readouterr().err


@pytest.mark.parametrize(
    "column", [{"messages": [{"role": "user", "content": "Hi"}]}, {"body": {}}, {"params": {}}]
)
def test_a_table_of_results_may_have_columns_of_other_vendors(
    column: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JSONL table is read as rows by `view`, `check`, `diff` and the page."""
    name = str(tmp_path / "t.jsonl")
    results = {"answer": "good", "finish_reason": "stop", "usage": None, "error": None}
    Path(name).write_text(json.dumps({"id": "a", **column, **results}), encoding="utf-8")
    assert main(["view", name]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["check", name]) == 0
    assert capsys.readouterr().out.split() == ["rows", "1", "ok", "1"]
    assert main(["diff", name, name]) == 0
    with open_page(name, None, None) as page:
        assert isinstance(page.rows, TablePage)


def test_a_page_is_there_until_ctrl_c(view: Type) -> None:
    """Its address is printed, with what it shows first; the process ends, and well."""
    del view
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(tidemill.__file__).parents[1]),
    }
    command = [sys.executable, "-m", "tidemill", "view", "rows.jsonl", "--browser", "--errors"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url, _, shown = process.stdout.readline().strip().partition("#")
        assert shown == "/?status=failed"
        with urllib.request.urlopen(f"{url}rows") as answer:  # noqa: S310 - ours
            assert b"<bdi>rows.jsonl</bdi>, 5 rows" in answer.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.count("\n") == 1


def test_flags_of_the_page_alone(view: Type, capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused elsewhere, and those of the terminal on the page."""
    del view
    for flags in (["--port", "8000"], ["--browser", "--full"]):
        assert main(["view", "rows.jsonl", *flags]) == 2
    assert "--browser" in capsys.readouterr().err


def test_the_id_column_of_a_table_is_that_of_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag names another one."""
    monkeypatch.chdir(tmp_path)
    usage = "{}"
    Path("t.output.csv").write_text(
        f"Ticket,Other,text,finish_reason,usage,error\nT-1,O-1,Hi,stop,{usage},\n"
    )
    assert main(["view", "t.output.csv", "--id", "Other"]) == 0
    assert capsys.readouterr().out.startswith("row 1  O-1")
    card = {"output": "t.output.csv", "input": "t.csv", "recipe": {"id": "Ticket"}}
    Path("t.output.card.json").write_text(json.dumps(card))
    assert main(["view", "t.output.csv"]) == 0
    assert capsys.readouterr().out.startswith("row 1  T-1")
    assert main(["view", "t.output.csv", "--id", "None"]) == 2
    assert "has no column `None` for --id: it has Ticket, Other" in capsys.readouterr().err
    Path("t.jsonl").write_text(row("a", chat("x")))
    assert main(["view", "t.jsonl", "--id", "a"]) == 2
