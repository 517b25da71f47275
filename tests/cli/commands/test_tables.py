"""`tidemill check` and `submit` of tables, typed."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from tests.cli.api_rig import Shell
from tidemill.cli.batches.wait import Targets

PROMPT = ("--prompt", "Say {{ text }}", "--id", "id")


def write(name: str, text: str) -> str:
    """Write a table."""
    Path(name).write_text(text)
    return name


def test_check_shows_the_first_requests(shell: Shell) -> None:
    """Three requests are printed as they would be sent."""
    table = write("t.csv", "id,text\n" + "".join(f"r{n},x{n}\n" for n in range(5)))
    result = shell.type("check", table, *PROMPT)
    assert result.status == 0
    assert result.out.startswith("5 rows, ")
    assert "/v1/chat/completions: 5 rows" in result.out
    shown = [json.loads(text.partition(":\n")[2]) for text in result.out.split("\nrow ")[1:]]
    assert [one["custom_id"] for one in shown] == ["r0", "r1", "r2"]
    assert shown[1]["body"]["messages"] == [{"role": "user", "content": "Say x1"}]


def test_check_shows_rows_with_their_questions(shell: Shell) -> None:
    """Text is shown as the model reads it; a question with an invalid form is rejected first."""
    table = write("t.csv", "id,text\na,It broke.\n")
    questions = ("--ask", "team = billing|shipping: Which team?", "--ask", "damaged: Is it broken?")
    result = shell.type("check", table, *questions, "--id", "id")
    assert result.status == 0
    assert "/v1/decisions: 1 row" in result.out
    assert result.out.endswith(
        "row 1:\nQuestion 1: Which team?\nA: billing\nB: shipping\n\nQuestion 2: Is it broken?\n\n"
        "Input:\ntext: It broke.\n\n"
    )
    row_first = shell.type("check", table, *questions, "--question-layout", "row_first")
    assert "row 1:\nid: a\ntext: It broke.\n\nQuestion: Which team?\nA: " in row_first.out
    long = write("long.csv", f"text\n{'x' * 30_000}\n")
    shown = shell.type("check", long, *questions, "--question-layout", "row_first").out
    assert re.search(r"x\n\[20,\d{3} more characters\]\nx", shown)
    assert "team" in shown[-5_000:]
    result = shell.type("check", table, "--ask", "text: Is it broken?")
    assert (result.status, "the question `text` needs a column `text`" in result.err) == (1, True)
    result = shell.type("check", table, "--ask", "Is it broken?")
    assert result.status == 2
    assert "has no colon: write 'answer: Is it broken?'" in result.err


@pytest.mark.parametrize("command", ["check", "submit"])
def test_rows_without_a_request_are_reported(shell: Shell, command: str) -> None:
    """The error contains row and column, or an unknown parameter; nothing is uploaded."""
    table = write("t.csv", "id,text\na,x\nb,\n")
    result = shell.type(command, table, *PROMPT)
    assert result.status == 1
    assert "row 2: column `text` is null" in result.err
    write("t.recipe.toml", "params = {temprature = 0}")
    result = shell.type(command, table, *PROMPT, "--on-invalid-line", "skip", "--strict-parameters")
    assert result.status == 1
    assert "did you mean `temperature`?" in result.err
    assert shell.api.batches == {}


def test_a_file_of_requests_is_checked_as_by_submit(shell: Shell) -> None:
    """The check does not need a server."""
    result = shell.type("check", write("t.jsonl", '{"text": "x"}\n'))
    assert result.status == 1
    assert "line 1: `custom_id` is required" in result.err


def test_waiting_ends_with_the_table(shell: Shell) -> None:
    """The rows that it was made of are gone, and the server lists the table by its name."""
    table = write("t.csv", "id,text\na,x\nb,y\n")
    assert shell.type("submit", table, *PROMPT, "--wait").status == 0
    assert shell.api.filenames == ["t.csv.jsonl"]
    with Path("t.output.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [(row["id"], row["text"]) for row in rows] == [("a", "x"), ("b", "y")]
    assert sorted(path.name for path in Path().glob("t.*")) == ["t.csv", "t.output.csv"]
    result = shell.type("submit", table, *PROMPT, "--wait")
    assert (result.status, "t.output.csv already exists" in result.err) == (2, True)
    assert len(shell.api.batches) == 1


@pytest.mark.parametrize("labels_spans", [False, True])
def test_failed_rows_of_a_token_classifier_have_its_column(
    shell: Shell, *, labels_spans: bool
) -> None:
    """The batch says whether its model labels spans, even if no row shows them."""

    def note(*_: str) -> None:
        for batch in shell.api.batches.values():
            batch["tidemill"]["labels_spans"] = labels_spans

    shell.api.seen = note
    table = write("t.csv", "text\na\n")
    write("t.recipe.toml", "url = '/v1/classify'\nprompt = '{{ text }}'\nparams.fail = 'no'\n")
    assert shell.type("submit", table, "--wait").status == 3
    names = arrow_csv.read_csv("t.output.csv").column_names
    expected = ["spans"] if labels_spans else ["label", "score", "probs"]
    assert names == ["text", *expected, "usage", "error"]


QUESTION = ("--ask", "good: Is it good?")
LEARNT = (*QUESTION, "--escalate", "large", "--target-accuracy", "0.9")


def write_gold(name: str, num_gold: int = 12) -> str:
    """Write a table of 12 rows, some of them with known answers."""
    cells = ["yes" if number < num_gold else "" for number in range(12)]
    text = "".join(f"x{number},{cell}\n" for number, cell in enumerate(cells))
    return write(name, f"text,known\n{text}")


@pytest.mark.parametrize("form", ["csv", "parquet", "flagless"])
def test_a_threshold_is_learnt_from_the_table_itself(shell: Shell, form: str) -> None:
    """It is uploaded with its recipe, because the known answers are in no request."""
    table, flags = write_gold("t.csv"), [*LEARNT, "--gold", "known"]
    if form == "parquet":
        pq.write_table(arrow_csv.read_csv(table), "t.parquet")
        table = "t.parquet"
    elif form == "flagless":
        flags = []
        keys = 'ask = ["good: Is it good?"]\ngold = "known"\nescalate = "large"\n'
        write("t.recipe.toml", f"{keys}target_accuracy = 0.9\npriority = -4\n")
    assert shell.type("submit", table, *flags, "--wait").status == 0
    [batch] = shell.api.batches.values()
    request, suffix = batch["request"], Path(table).suffix
    assert request["recipe"] == {
        "ask": ["good: Is it good?"],
        "gold": ["known"] if flags else "known",
        "output": suffix.removeprefix("."),
    }
    assert (request["escalate"], request["target_accuracy"]) == ("large", 0.9)
    assert request.get("priority") == (None if flags else -4)
    assert (request["endpoint"], shell.api.filenames) == ("/v1/decisions", [table])
    assert shell.api.files[request["input_file_id"]] == Path(table).read_bytes()
    assert Path(f"t.output{suffix}").read_bytes() == Path(table).read_bytes()
    assert [path.name for path in Path().glob("t.output*")] == [f"t.output{suffix}"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "`target_accuracy` needs `gold`, the column of the known answers"),
        (("--gold", "g.csv", "--id", "text"), "--gold FILE is not supported for batches"),
        (("--gold", "text"), "row 1: 'x0' is not an answer to `good`"),
        (("--gold", "known", "--calibrate", "platt"), "cannot be combined with `calibrate`"),
    ],
)
def test_a_threshold_that_cannot_be_learnt_is_refused(
    shell: Shell, flags: tuple[str, ...], words: str
) -> None:
    """Nothing is uploaded."""
    write("g.csv", "text,good\n" + "".join(f"x{number},yes\n" for number in range(12)))
    result = shell.type("submit", write_gold("t.csv"), *LEARNT, *flags)
    assert result.status in {1, 2}
    assert words in result.err
    assert shell.api.requests == []


def test_a_folder_has_no_learnt_threshold(shell: Shell) -> None:
    """Its tables are submitted as requests, without their known answers."""
    Path("folder").mkdir()
    write_gold("folder/t.csv")
    result = shell.type("submit", "folder", *LEARNT, "--gold", "known")
    assert result.status == 2
    assert "folder is a dataset or a folder: pass --escalate-below P instead" in result.err
    assert shell.api.batches == {}


def test_a_stopped_wait_for_a_table_names_its_command() -> None:
    """It fetches the table that the deployment has made."""
    targets = Targets(None, None, force=True, table="my t.csv")
    assert targets.resume_command("batch_1") == ("tidemill resume batch_1 -o 'my t.csv' --force")
