"""`from tidemill import run, submit`: commands as functions."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.api_rig import Shell, line
from tidemill import TidemillError, run, submit

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_run_returns_what_its_card_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags as keywords, those of tables too; a second one has to say what it wants.

    A terminal has a bar, with the messages of the run above it.
    """
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    source, out = tmp_path / "t.csv", tmp_path / "o.jsonl"
    source.write_text("id,q\na,What is the capital of France?\nb,\n")
    flags = {"prompt": "{{ q }}", "keep": ["id"], "max_tokens": 8, "on_invalid_line": "skip"}
    done = run(source, out, **flags)
    assert (done.output, done.num_rows, done.num_ok, done.num_failed) == (out, 2, 1, 1)
    assert done.card["tokens"]["completion"] > 0
    assert "2/2 1 failed" in terminal.getvalue()
    assert "model loaded" in terminal.getvalue()
    rows = [json.loads(row) for row in out.read_text().splitlines()]
    assert [(row["id"], row["text"]) for row in rows] == [("a", "Paris"), ("b", None)]
    with pytest.raises(TidemillError, match="already exists"):
        run(source, out, **flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"labels": ["yes, always", "no"]},
            "`labels` has an item with a comma, 'yes, always': set",
        ),
        ({"ask": [{"name": "x", "instructions": "Is it?"}]}, "`ask` has a table, an object"),
        ({"ask": "x: Is it?", "gold": {"x": "known"}}, "`gold` has a table, an object: set it"),
    ],
)
def test_a_value_that_flags_cannot_hold_is_refused(flags: dict[str, Any], words: str) -> None:
    """A comma would split a label silently."""
    with pytest.raises(TidemillError, match=words):
        run("t.csv", **flags)


def test_a_run_decides_questions(tmp_path: Path) -> None:
    """Several flags of one name are a list."""
    source = tmp_path / "t.csv"
    source.write_text("q\nMy lamp is broken.\n")
    questions = ["broken: Is it broken?", "team = a|b: Which?"]
    done = run(source, ask=questions, permutations=2, progress=False)
    assert [one["name"] for one in done.card["questions"]] == ["broken", "team"]
    assert done.output.read_text().startswith("q,broken,broken_confidence,")
    done = run(source, tmp_path / "o.csv", prompt="{{ q }}", labels=["a", "b"], progress=False)
    assert done.output.read_text().startswith("q,label,label_confidence,")


# Three runs of a model; the command's own tests resume with a scripted engine, and the others here
# prove that keywords are flags and that refusals are exceptions.
@pytest.mark.long
def test_a_run_is_resumed_with_its_settings(tmp_path: Path) -> None:
    """Other ones are an exception; keywords allow them, or a higher limit for truncated rows."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0}
    lines = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name in "ab"]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    run(source, out, max_tokens=1, progress=False)
    with pytest.raises(TidemillError, match="--max-tokens: 1 before, 2 now"):
        run(source, out, max_tokens=2, resume=True, progress=False)
    done = run(source, out, max_tokens=2, resume=True, retry_truncated=True, progress=False)
    assert [use["settings"]["--max-tokens"] for use in done.card["made_with"]] == [2]
    tokens = [json.loads(row)["response"]["body"]["usage"] for row in out.read_text().splitlines()]
    assert [usage["completion_tokens"] for usage in tokens] == [2, 2]
    flags = {"max_tokens": 3, "allow_other_settings": True}
    done = run(source, out, resume=True, progress=False, **flags)
    assert done.num_ok == 2
    assert done.card["settings"]["defaults"]["max_tokens"] == 2


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("none.csv", {}, "none.csv does not exist"),
        ("t.csv", {"prompt": "{{ nope }}"}, "did you mean|not a column of the table"),
        ("t.csv", {"colour": 1}, "--colour"),
        ("t.csv", {"max_tokens": "many"}, "--max-tokens"),
    ],
)
def test_what_cannot_run_is_an_exception(
    tmp_path: Path, name: str, flags: dict[str, object], words: str
) -> None:
    """The exception has the command's error."""
    (tmp_path / "t.csv").write_text("q\nx\n")
    with pytest.raises(TidemillError, match=words):
        run(tmp_path / name, tmp_path / "out", **flags)
    with pytest.raises(TidemillError, match="requires a file for its rows"):
        run("-")


def test_a_run_ends_with_its_program(tmp_path: Path) -> None:
    """It ends even if the program is killed."""
    source = tmp_path / "in.jsonl"
    body = {"prompt": "Hi", "max_tokens": 1_900, "ignore_eos": True}
    lines = [{"custom_id": str(n), "url": "/v1/completions", "body": body} for n in range(200)]
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    program = f"import tidemill; tidemill.run({str(source)!r}, no_plan=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stderr is not None
        while "model loaded" not in parent.stderr.readline():
            pass
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        watched = os.pidfd_open(int(children[0]))
        parent.kill()
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)


def test_submitting_returns_the_batch(shell: Shell) -> None:
    """Ended with `wait`; what the server refuses is an exception."""
    path = shell.file(line("a"))
    assert submit(path, metadata=["a=b"])["status"] == "validating"
    assert submit(path, wait=True)["status"] == "completed"
    with pytest.raises(TidemillError, match="custom_id"):
        submit(shell.file({"no": "request"}, name="bad.jsonl"))
