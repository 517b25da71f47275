"""`tidemill submit`, typed, against a small API over HTTP."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.api_rig import Shell, line
from tests.cli.fake_api import PART_BYTES, Fault, row_of
from tidemill.batch.file.lines import EXAMPLE_LINE

ROOT = Path(__file__).parents[3]
LARGE = [line(str(number), pad="x" * 2**20) for number in range(6)]


def test_a_file_becomes_a_batch_whose_id_is_printed(shell: Shell) -> None:
    """Alone on standard output; how to go on is said on standard error, nothing is waited for."""
    said = shell.type("submit", shell.file(line("a"), line("b")))
    [batch] = shell.api.batches.values()
    assert (said.status, said.out) == (0, f"{batch['id']}\n")
    assert f"`tidemill resume {batch['id']}`" in said.err
    assert batch["asked"] == {
        "input_file_id": "file-1",
        "completion_window": "24h",
        "endpoint": "/v1/completions",
    }
    assert shell.api.files["file-1"] == Path("in.jsonl").read_bytes()
    assert shell.pauses == []


def test_every_option_reaches_the_request(shell: Shell) -> None:
    """As the API names them."""
    typed = (
        "--endpoint /v1/chat/completions --window 2h --metadata team=search --metadata a=b=c "
        "--output-url https://x.example/o --error-url https://x.example/e "
        "--webhook-url https://x.example/w --on-invalid-line skip --strict-parameters --create-only"
    )
    assert shell.type("submit", shell.file(line("a")), *typed.split()).status == 0
    [batch] = shell.api.batches.values()
    assert batch["asked"] == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "2h",
        "metadata": {"team": "search", "a": "b=c"},
        "output_url": "https://x.example/o",
        "error_url": "https://x.example/e",
        "webhook_url": "https://x.example/w",
        "on_invalid_line": "skip",
        "strict_parameters": True,
    }


def test_waiting_ends_with_the_rows(shell: Shell) -> None:
    """They lie beside the input; a row that failed makes the exit status a 3."""
    lines = [line("a"), line("b", fail=True), line("c")]
    said = shell.type("submit", shell.file(*lines), "--wait")
    assert said.status == 3
    assert Path("in.output.jsonl").read_bytes() == row_of(lines[0]) + row_of(lines[2])
    assert Path("in.errors.jsonl").read_bytes() == row_of(lines[1])
    assert "2 rows ok, 1 failed" in said.err
    assert sorted(path.name for path in shell.folder.iterdir() if path.is_file()) == [
        "in.errors.jsonl",
        "in.jsonl",
        "in.output.jsonl",
    ]


@pytest.mark.parametrize(
    ("end", "status"), [("completed", 0), ("failed", 4), ("expired", 5), ("cancelled", 6)]
)
def test_the_exit_status_tells_the_outcome(shell: Shell, end: str, status: int) -> None:
    """Each end has its own."""
    assert shell.type("submit", shell.file(line("a", end=end)), "--wait").status == status


def test_json_is_all_there_is_on_standard_output(shell: Shell) -> None:
    """The batch as it was made and each time it changed; last how it ended and where rows are."""
    said = shell.type("submit", shell.file(line("a")), "--wait", "--json")
    assert said.status == 0
    statuses = [value["status"] for value in said.values]
    assert statuses == ["validating", "in_progress", "completed"]
    assert said.values[-1]["saved"]["output"] == str(shell.folder / "in.output.jsonl")


def test_rows_on_standard_output_are_alone_there(shell: Shell) -> None:
    """The id is said on standard error then."""
    lines = [line("a"), line("b")]
    said = shell.type("submit", shell.file(*lines), "--wait", "-o", "-")
    [batch_id] = shell.api.batches
    assert (said.status, said.out.encode()) == (0, row_of(lines[0]) + row_of(lines[1]))
    assert f"{batch_id} is made" in said.err


def test_an_id_that_nobody_takes_is_said(shell: Shell) -> None:
    """A batch that was made is not lost with its id."""
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "tidemill", "submit", shell.file(line("a"))],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    [batch_id] = shell.api.batches
    assert ended.returncode == 1
    assert ended.stderr == (
        "tidemill: standard output cannot be written (No space left on device); "
        f"the batch {batch_id} is made all the same\n"
    )


def test_every_bad_line_is_named_and_nothing_is_uploaded(shell: Shell) -> None:
    """The first hundred, then how many there are more."""
    bad = [{"custom_id": str(number)} for number in range(105)]
    said = shell.type("submit", shell.file(line("good"), *bad))
    assert (said.status, said.out) == (1, "")
    assert "100 × `url` is required and must be a string: lines 2–101\n" in said.err
    assert f"A line looks like this:\n{EXAMPLE_LINE}\n" in said.err
    assert "5 more errors are not listed." in said.err
    assert shell.api.files == {}


def test_lines_that_an_engine_will_refuse_are_told_before_the_upload(shell: Shell) -> None:
    """In the words of their rows to come; the others go on."""
    said = shell.type("submit", shell.file(line("a"), line("c", n=0)))
    assert said.status == 0
    assert "warning: 1 of 2 lines will get an error row:\n  1 × `n` must be " in said.err


def test_unknown_parameters_are_told_before_the_upload(shell: Shell) -> None:
    """Also by a dry run; where that is strict the file is not uploaded."""
    file = shell.file(line("a", temprature=1), line("b", temprature=1))
    sentence = "is not a parameter of /v1/completions; did you mean `temperature`?\n"
    said = shell.type("submit", file, "--dry-run")
    assert f"  `temprature` in 2 lines (first: line 1) {sentence}" in said.err
    assert "nothing else is wrong with it" in said.out
    [value] = shell.type("submit", file, "--dry-run", "--json").values
    assert [each["name"] for each in value["unknown_parameters"]] == ["temprature"]
    said = shell.type("submit", file, "--strict-parameters")
    assert said.status == 1
    assert f"  line 1: `temprature` in 2 lines {sentence}" in said.err
    assert shell.api.files == {}
    assert shell.type("submit", file).status == 0


def test_a_file_of_which_no_line_can_run_is_not_uploaded(shell: Shell) -> None:
    """As `run` refuses it."""
    said = shell.type("submit", shell.file(line("a", max_tokens="8"), line("b", max_tokens="9")))
    assert (said.status, said.out) == (1, "")
    assert "none of its 2 lines can run:\n  2 × `max_tokens` must be " in said.err
    assert shell.api.files == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n", "The file has no lines"),
        (b"", "The file has no lines"),
        (b"\x1f\x8b\x08", "The gzip data is truncated after 3 bytes"),
        (b"PK\x03\x04\x14\x00", "extract it"),
        (b"a,b\n1,2\n", "looks like CSV"),
        (b"[\n{}\n]\n", "element 1: `custom_id` is required"),
        (b"[{},]", "Element 1 of the array is the last one, but a comma follows it"),
    ],
)
def test_what_is_no_file_of_requests_is_refused(shell: Shell, content: bytes, words: str) -> None:
    """With what it looks like."""
    Path("in.jsonl").write_bytes(content)
    said = shell.type("submit", "in.jsonl")
    assert (said.status, said.out) == (1, "")
    assert words in said.err
    assert shell.api.files == {}


def test_a_model_that_is_not_served_is_found_here(shell: Shell) -> None:
    """The server is asked for its models first."""
    said = shell.type("submit", shell.file(line("a", model="other")))
    assert said.status == 1
    assert "The model `other` does not exist. Served: tidemill-demo. Use one of these" in said.err


def test_windows_line_ends_are_no_mistake(shell: Shell) -> None:
    """And the file goes to the server byte for byte."""
    content = json.dumps(line("a")).encode() + b"\r\n" + json.dumps(line("b")).encode() + b"\r\n"
    Path("in.jsonl").write_bytes(content)
    assert shell.type("submit", "in.jsonl").status == 0
    assert shell.api.files["file-1"] == content


def test_standard_input_is_a_file_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows lie in the folder where the command was given."""
    content = io.BytesIO(json.dumps(line("a")).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    assert shell.type("submit", "-", "--wait").status == 0
    assert Path("batch.output.jsonl").read_bytes() == row_of(line("a"))


def test_a_dry_run_needs_no_server(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is in the file, and that nobody was asked for the models."""
    monkeypatch.delenv("TIDEMILL_BASE_URL")
    monkeypatch.delenv("TIDEMILL_API_KEY")
    file = shell.file(line("a", model="m"), line("b", model="m", prompt="x" * 40, n=2))
    said = shell.type("submit", file, "--dry-run")
    assert said.status == 0
    assert said.out.splitlines() == [
        f"2 lines, {Path(file).stat().st_size:,} bytes",
        "/v1/completions: 2 lines",
        "model m: 2 lines",
        "about 12 tokens in, at most 15 out",
        "nothing is wrong with it, as far as can be told without a server",
    ]
    assert shell.api.requests == []


def test_a_dry_run_asks_for_the_models_of_a_server_that_is_named(shell: Shell) -> None:
    """And prints its findings as JSON, errors too."""
    said = shell.type("submit", shell.file(line("a", model="m")), "--dry-run", "--json")
    assert said.status == 1
    [value] = said.values
    assert (value["lines"], value["num_errors"]) == (1, 1)
    assert [(error["code"], error["line"]) for error in value["errors"]] == [("model_not_found", 1)]
    assert shell.api.requests == [("GET", "/v1/models")]


def test_a_large_file_goes_in_parts(shell: Shell) -> None:
    """Each to the storage itself, without the key, and none twice."""
    file = shell.file(*LARGE)
    assert shell.type("submit", file).status == 0
    [batch] = shell.api.batches.values()
    assert shell.api.files[batch["asked"]["input_file_id"]] == Path(file).read_bytes()
    assert shell.api.count("PUT", "/storage/part/") == -(-Path(file).stat().st_size // PART_BYTES)
    assert shell.api.count("POST", "/v1/files") == 0


def test_a_part_whose_connection_breaks_is_sent_again(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That part alone, in the middle of which it broke; storage that is busy is waited for.

    The bar goes back by what was for nothing.
    """
    shown: list[int] = []
    monkeypatch.setattr(
        "tidemill.cli.transfer.upload.byte_progress",
        lambda *_: contextlib.nullcontext(shown.append),
    )
    shell.api.faults = [
        Fault("PUT", "/storage/part/upload_1/2$", after_bytes=300_000),
        Fault("PUT", "/storage/part/upload_1/3$", status=503, headers={"Retry-After": "0"}),
        Fault("PUT", "/storage/part/upload_1/4$", status=403),
    ]
    file = shell.file(*LARGE)
    assert shell.type("submit", file).status == 0
    assert Path(file).read_bytes() in shell.api.files.values()
    tries = [shell.api.count("PUT", f"/upload_1/{number}$") for number in (1, 2, 3, 4, 5)]
    assert tries == [1, 2, 2, 2, 1]
    assert sum(shown) == Path(file).stat().st_size


def test_an_upload_that_was_cut_off_goes_on(shell: Shell) -> None:
    """The same command sends what is missing; afterwards a submission is a new one again."""
    shell.api.faults = [Fault("PUT", "/upload_1/5$", status=400, times=99)]
    file = shell.file(*LARGE)
    first = shell.type("submit", file)
    assert first.status == 1
    assert "the storage does not take a part of the upload: HTTP 400" in first.err
    sent = set(shell.api.uploads["upload_1"]["parts"])
    assert sent
    shell.api.faults = []
    shell.api.requests.clear()
    second = shell.type("submit", file)
    assert second.status == 0
    assert "going on with an upload" in second.err
    assert list(shell.api.uploads) == ["upload_1"]
    # A part that was under way when the first command ended may have arrived since.
    assert shell.api.count("PUT", "/upload_1/") <= 7 - len(sent)
    shell.api.requests.clear()
    assert shell.type("submit", file).out != second.out
    assert list(shell.api.uploads) == ["upload_1", "upload_2"]


def test_an_upload_that_the_server_has_forgotten_begins_anew(shell: Shell) -> None:
    """Nobody has to remove anything."""
    shell.api.faults = [Fault("PUT", "/upload_1/5$", status=400, times=99)]
    file = shell.file(*LARGE)
    assert shell.type("submit", file).status == 1
    shell.api.faults = []
    shell.api.uploads["upload_1"]["status"] = "expired"
    assert shell.type("submit", file).status == 0
    assert list(shell.api.uploads) == ["upload_1", "upload_2"]


def test_an_answer_that_got_lost_makes_no_second_batch(shell: Shell) -> None:
    """Neither within the command nor when it is given again; nor does the file go twice."""
    file = shell.file(line("a"))
    shell.api.faults = [Fault("POST", "/v1/batches", times=99, is_carried_out=True)]
    assert shell.type("submit", file).status == 7
    shell.api.faults = [Fault("POST", "/v1/batches", times=2, is_carried_out=True)]
    said = shell.type("submit", file)
    assert said.status == 0
    assert list(shell.api.batches) == [said.out.strip()]
    assert shell.api.count("POST", "/v1/files") == 1


def test_other_options_after_a_lost_answer_are_another_batch(shell: Shell) -> None:
    """They would be refused under the key of the first."""
    file = shell.file(line("a"))
    shell.api.faults = [Fault("POST", "/v1/batches", times=99, is_carried_out=True)]
    assert shell.type("submit", file).status == 7
    shell.api.faults = []
    assert shell.type("submit", file, "--window", "2h").status == 0
    windows = [batch["asked"]["completion_window"] for batch in shell.api.batches.values()]
    assert windows == ["24h", "2h"]


def test_outputs_that_are_there_are_kept(shell: Shell) -> None:
    """Refused before anything is sent; --force writes over them."""
    file = shell.file(line("a"))
    Path("in.output.jsonl").write_text("mine")
    said = shell.type("submit", file, "--wait")
    assert said.status == 2
    assert "in.output.jsonl is there already: name another file, or give --force" in said.err
    assert shell.api.requests == []
    assert shell.type("submit", file, "--wait", "--force").status == 0
    assert Path("in.output.jsonl").read_bytes() == row_of(line("a"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl"], "none.jsonl cannot be read: No such file"),
        (["."], ". is a directory"),
        ([""], "the name of the file is empty"),
        (["in.jsonl", "--window", "1m"], "--window must be a number of minutes"),
        (["in.jsonl", "--output-url", "http://x"], "--output-url must be an https URL"),
        (["in.jsonl", "--wait", "-o", "none/out"], "is in a folder that does not exist: none"),
        (["in.jsonl", "--wait", "-o", "x", "-e", "x"], "-o and -e are the same file"),
        (["in.jsonl", "-o", "out.jsonl"], "-o and -e are for the rows that --wait fetches"),
        (["in.jsonl", "--wait", "--json", "-o", "-"], "cannot share standard output"),
        (["in.jsonl", "--wait", "--force", "-o", "./in.jsonl"], "./in.jsonl is the input"),
        (["in.jsonl", "--base-url", "ftp://x"], "must begin with https://"),
        (["in.jsonl", "--base-url", "https://u:p@x"], "must have no user"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_sent(
    shell: Shell, arguments: list[str], words: str
) -> None:
    """Exit status 2 and what is wrong."""
    shell.file(line("a"))
    said = shell.type("submit", *arguments)
    assert (said.status, said.out) == (2, "")
    assert words in said.err
    assert shell.api.requests == []


def test_ctrl_c_leaves_the_batch_running(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is a signal's, and the command that goes on is said."""
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", lambda _: os.kill(os.getpid(), 2))
    said = shell.type("submit", shell.file(line("a b")), "--wait", "-o", "my rows")
    [batch_id] = shell.api.batches
    assert (said.status, said.out) == (130, f"{batch_id}\n")
    assert f"`tidemill resume {batch_id} -o 'my rows' -e" in said.err
    assert shell.api.count("POST", "/cancel") == 0
