"""`tidemill submit`, typed, against a small API over HTTP."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from tests.cli.api_rig import Shell, line
from tests.cli.fake_api import PART_BYTES, Fault, row_of
from tidemill.batch.file.lines import EXAMPLE_LINE

LARGE = [line(str(number), pad="x" * 2**20) for number in range(6)]


def test_a_file_becomes_a_batch_whose_id_is_printed(shell: Shell) -> None:
    """Only the ID is on standard output; standard error contains how to continue."""
    result = shell.type("submit", shell.file(line("a"), line("b")))
    [batch] = shell.api.batches.values()
    assert (result.status, result.out) == (0, f"{batch['id']}\n")
    assert f"`tidemill resume {batch['id']}`" in result.err
    assert batch["request"] == {
        "input_file_id": "file-1",
        "completion_window": "24h",
        "endpoint": "/v1/completions",
    }
    assert shell.api.files["file-1"] == Path("in.jsonl").read_bytes()
    assert shell.pauses == []


def test_every_option_reaches_the_request(shell: Shell) -> None:
    """The request has the API's names."""
    typed = (
        "--endpoint /v1/chat/completions --window 2h --metadata team=search --metadata a=b=c "
        "--output-url https://x.example/o --error-url https://x.example/e "
        "--webhook-url https://x.example/w --on-invalid-line skip --strict-parameters "
        "--create-only --escalate large --escalate-below 0.8 --escalate-by chat "
        "--echo-fields label,metadata"
    )
    assert shell.type("submit", shell.file(line("a")), *typed.split()).status == 0
    [batch] = shell.api.batches.values()
    assert batch["request"] == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "2h",
        "metadata": {"team": "search", "a": "b=c"},
        "output_url": "https://x.example/o",
        "error_url": "https://x.example/e",
        "webhook_url": "https://x.example/w",
        "on_invalid_line": "skip",
        "strict_parameters": True,
        "escalate": "large",
        "escalate_below": 0.8,
        "escalate_by": "chat",
        "echo_fields": ["label", "metadata"],
    }


def test_waiting_ends_with_the_rows(shell: Shell) -> None:
    """They are stored next to the input; a failed row results in exit status 3."""
    lines = [line("a"), line("b", fail=True), line("c")]
    result = shell.type("submit", shell.file(*lines), "--wait")
    assert result.status == 3
    assert Path("in.output.jsonl").read_bytes() == row_of(lines[0]) + row_of(lines[2])
    assert Path("in.errors.jsonl").read_bytes() == row_of(lines[1])
    assert "2 rows ok, 1 failed" in result.err
    assert sorted(path.name for path in shell.folder.iterdir() if path.is_file()) == [
        "in.errors.jsonl",
        "in.jsonl",
        "in.output.jsonl",
    ]


@pytest.mark.parametrize(
    ("end", "status"), [("completed", 0), ("failed", 4), ("expired", 5), ("cancelled", 6)]
)
def test_the_exit_status_shows_the_outcome(shell: Shell, end: str, status: int) -> None:
    """Each outcome has a separate exit status."""
    assert shell.type("submit", shell.file(line("a", end=end)), "--wait").status == status


def test_json_is_all_there_is_on_standard_output(shell: Shell) -> None:
    """The batch is printed after its creation and each change, and finally with its files."""
    result = shell.type("submit", shell.file(line("a")), "--wait", "--json")
    assert result.status == 0
    statuses = [value["status"] for value in result.values]
    assert statuses == ["validating", "in_progress", "completed"]
    assert result.values[-1]["saved"]["output"] == str(shell.folder / "in.output.jsonl")


def test_rows_on_standard_output_are_alone_there(shell: Shell) -> None:
    """In this case, the ID is logged on standard error."""
    lines = [line("a"), line("b")]
    result = shell.type("submit", shell.file(*lines), "--wait", "-o", "-")
    [batch_id] = shell.api.batches
    assert (result.status, result.out.encode()) == (0, row_of(lines[0]) + row_of(lines[1]))
    assert f"{batch_id} was created" in result.err


def test_an_id_that_cannot_be_printed_is_logged(shell: Shell) -> None:
    """The ID of the created batch is not lost."""
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "tidemill", "submit", shell.file(line("a"))],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    [batch_id] = shell.api.batches
    assert ended.returncode == 1
    assert ended.stderr == (
        "tidemill: standard output cannot be written (No space left on device); "
        f"the batch {batch_id} was created anyway\n"
    )


def test_every_bad_line_is_named_and_nothing_is_uploaded(shell: Shell) -> None:
    """The first hundred are listed, then the number of others."""
    bad = [{"custom_id": str(number)} for number in range(105)]
    result = shell.type("submit", shell.file(line("good"), *bad))
    assert (result.status, result.out) == (1, "")
    assert "100 × `url` is required and must be a string: lines 2–101\n" in result.err
    assert f"Example of a valid line:\n{EXAMPLE_LINE}\n" in result.err
    assert "5 more errors are not listed." in result.err
    assert shell.api.files == {}


def test_lines_that_an_engine_will_reject_are_reported_before_the_upload(shell: Shell) -> None:
    """The warning contains the messages of their future rows; other lines run."""
    result = shell.type("submit", shell.file(line("a"), line("c", n=0)))
    assert result.status == 0
    assert "warning: 1 of 2 lines will get an error row:\n  1 × `n` must be " in result.err


def test_unknown_parameters_are_reported_before_the_upload(shell: Shell) -> None:
    """A dry run reports them, too; with --strict-parameters the file is not uploaded."""
    file = shell.file(line("a", temprature=1), line("b", temprature=1))
    sentence = "is not a parameter of /v1/completions; did you mean `temperature`?\n"
    result = shell.type("submit", file, "--dry-run")
    assert f"  `temprature` in 2 lines (first: line 1) {sentence}" in result.err
    assert "no other problems found" in result.out
    [value] = shell.type("submit", file, "--dry-run", "--json").values
    assert [each["name"] for each in value["unknown_parameters"]] == ["temprature"]
    result = shell.type("submit", file, "--strict-parameters")
    assert result.status == 1
    assert f"  line 1: `temprature` in 2 lines {sentence}" in result.err
    assert shell.api.files == {}
    assert shell.type("submit", file).status == 0


def test_a_file_of_which_no_line_can_run_is_not_uploaded(shell: Shell) -> None:
    """`run` refuses it, too."""
    result = shell.type("submit", shell.file(line("a", max_tokens="8"), line("b", max_tokens="9")))
    assert (result.status, result.out) == (1, "")
    assert "none of its 2 lines can run:\n  2 × `max_tokens` must be " in result.err
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
def test_anything_but_a_file_of_requests_is_refused(
    shell: Shell, content: bytes, words: str
) -> None:
    """The error contains the probable format."""
    Path("in.jsonl").write_bytes(content)
    result = shell.type("submit", "in.jsonl")
    assert (result.status, result.out) == (1, "")
    assert words in result.err
    assert shell.api.files == {}


def test_a_model_that_is_not_served_is_found_here(shell: Shell) -> None:
    """The served models are requested first."""
    result = shell.type("submit", shell.file(line("a", model="other")))
    assert result.status == 1
    assert "The model `other` does not exist. Served: tidemill-demo. Use one of these" in result.err


def test_windows_line_ends_are_accepted(shell: Shell) -> None:
    """The file is uploaded unchanged."""
    content = json.dumps(line("a")).encode() + b"\r\n" + json.dumps(line("b")).encode() + b"\r\n"
    Path("in.jsonl").write_bytes(content)
    assert shell.type("submit", "in.jsonl").status == 0
    assert shell.api.files["file-1"] == content


def test_standard_input_is_a_file_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are stored in the working folder."""
    content = io.BytesIO(json.dumps(line("a")).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    assert shell.type("submit", "-", "--wait").status == 0
    assert Path("batch.output.jsonl").read_bytes() == row_of(line("a"))


def test_a_dry_run_needs_no_server(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints a summary of the file, with a note that no server was contacted."""
    monkeypatch.delenv("TIDEMILL_BASE_URL")
    monkeypatch.delenv("TIDEMILL_API_KEY")
    file = shell.file(line("a", model="m"), line("b", model="m", prompt="x" * 40, n=2))
    result = shell.type("submit", file, "--dry-run")
    assert result.status == 0
    assert result.out.splitlines() == [
        f"2 lines, {Path(file).stat().st_size:,} bytes",
        "/v1/completions: 2 lines",
        "model m: 2 lines",
        "about 12 tokens in, at most 15 out",
        "no problems found (not checked against a server)",
    ]
    assert shell.api.requests == []


def test_a_dry_run_checks_the_models_of_a_given_server(shell: Shell) -> None:
    """It prints its report as JSON, including errors."""
    result = shell.type("submit", shell.file(line("a", model="m")), "--dry-run", "--json")
    assert result.status == 1
    [value] = result.values
    assert (value["lines"], value["num_errors"]) == (1, 1)
    assert [(error["code"], error["line"]) for error in value["errors"]] == [("model_not_found", 1)]
    assert shell.api.requests == [("GET", "/v1/models")]


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (None, []),
        ({"tokens_per_second": 0.1, "cost_per_hour": None}, ["about 1 min 42 s of one worker"]),
        (
            {"tokens_per_second": 0.1, "cost_per_hour": 36.0},
            ["about 1 min 42 s of one worker, which costs about 1.02"],
        ),
    ],
)
def test_a_dry_run_names_the_time_and_the_cost(
    shell: Shell, speed: dict[str, float | None] | None, expected: list[str]
) -> None:
    """They follow from the measured speed of the model's workers and the price of their GPUs."""
    shell.api.speed = speed
    file = shell.file(line("a", prompt="x" * 40, max_tokens=9))
    result = shell.type("submit", file, "--dry-run")
    assert (result.status, result.out.splitlines()[-2:-1]) == (0, expected or ANY)
    assert ("of one worker" in result.out) == bool(expected)
    [value] = shell.type("submit", file, "--dry-run", "--json").values
    assert ("estimated_seconds" in value) == bool(expected)


def test_a_large_file_goes_in_parts(shell: Shell) -> None:
    """Each to the storage itself, without the key, and none twice."""
    file = shell.file(*LARGE)
    assert shell.type("submit", file).status == 0
    [batch] = shell.api.batches.values()
    assert shell.api.files[batch["request"]["input_file_id"]] == Path(file).read_bytes()
    assert shell.api.count("PUT", "/storage/part/") == -(-Path(file).stat().st_size // PART_BYTES)
    assert shell.api.count("POST", "/v1/files") == 0


def test_a_part_whose_connection_breaks_is_sent_again(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that part is sent again; busy storage is retried.

    The bar moves back by the failed part.
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
    assert "part of the upload was rejected: storage returned HTTP 400" in first.err
    sent = set(shell.api.uploads["upload_1"]["parts"])
    assert sent
    shell.api.faults = []
    shell.api.requests.clear()
    second = shell.type("submit", file)
    assert second.status == 0
    assert "resuming an upload" in second.err
    assert list(shell.api.uploads) == ["upload_1"]
    # A part that was under way when the first command ended may have arrived since.
    assert shell.api.count("PUT", "/upload_1/") <= 7 - len(sent)
    shell.api.requests.clear()
    assert shell.type("submit", file).out != second.out
    assert list(shell.api.uploads) == ["upload_1", "upload_2"]


def test_an_upload_that_the_server_has_forgotten_starts_again(shell: Shell) -> None:
    """The user does not have to remove a file."""
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
    result = shell.type("submit", file)
    assert result.status == 0
    assert list(shell.api.batches) == [result.out.strip()]
    assert shell.api.count("POST", "/v1/files") == 1


def test_other_options_after_a_lost_answer_are_another_batch(shell: Shell) -> None:
    """They would be refused under the key of the first."""
    file = shell.file(line("a"))
    shell.api.faults = [Fault("POST", "/v1/batches", times=99, is_carried_out=True)]
    assert shell.type("submit", file).status == 7
    shell.api.faults = []
    assert shell.type("submit", file, "--window", "2h").status == 0
    windows = [batch["request"]["completion_window"] for batch in shell.api.batches.values()]
    assert windows == ["24h", "2h"]


def test_outputs_that_are_there_are_kept(shell: Shell) -> None:
    """They are refused before anything is sent; --force overwrites them."""
    file = shell.file(line("a"))
    Path("in.output.jsonl").write_text("mine")
    result = shell.type("submit", file, "--wait")
    assert result.status == 2
    assert "in.output.jsonl already exists: choose another file, or pass --force" in result.err
    assert shell.api.requests == []
    assert shell.type("submit", file, "--wait", "--force").status == 0
    assert Path("in.output.jsonl").read_bytes() == row_of(line("a"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl"], "none.jsonl cannot be read: No such file"),
        (["."], ". is a directory"),
        ([""], "the file name is empty"),
        (["in.jsonl", "--window", "1m"], "--window must be a number of minutes"),
        (["in.jsonl", "--echo-fields", "id"], "--echo-fields: 'id' must be 1 to 16 names"),
        (["in.jsonl", "--output-url", "http://x"], "--output-url must be an https URL"),
        (["in.jsonl", "--wait", "-o", "none/out"], "is in a folder that does not exist: none"),
        (["in.jsonl", "--wait", "-o", "x", "-e", "x"], "-o and -e are the same file"),
        (["in.jsonl", "-o", "out.jsonl"], "-o and -e require --wait"),
        (["in.jsonl", "--wait", "--json", "-o", "-"], "cannot share standard output"),
        (["in.jsonl", "--wait", "--force", "-o", "./in.jsonl"], "./in.jsonl is the input"),
        (["in.jsonl", "--base-url", "ftp://x"], "must start with https://"),
        (["in.jsonl", "--base-url", "https://u:p@x"], "must not contain a user"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_sent(
    shell: Shell, arguments: list[str], words: str
) -> None:
    """The exit status is 2, and the error names the fault."""
    shell.file(line("a"))
    result = shell.type("submit", *arguments)
    assert (result.status, result.out) == (2, "")
    assert words in result.err
    assert shell.api.requests == []


def test_ctrl_c_leaves_the_batch_running(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is the signal's, and the command to continue is logged."""
    monkeypatch.setattr("tidemill.offline.console.backoff.sleep", lambda _: os.kill(os.getpid(), 2))
    result = shell.type("submit", shell.file(line("a b")), "--wait", "-o", "my rows")
    [batch_id] = shell.api.batches
    assert (result.status, result.out) == (130, f"{batch_id}\n")
    assert f"`tidemill resume {batch_id} -o 'my rows' -e" in result.err
    assert shell.api.count("POST", "/cancel") == 0
