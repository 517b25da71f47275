"""`tidemill resume`, `status`, `results` and `cancel`, typed, against a small API over HTTP."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.main import main
from tests.cli.api_rig import Shell, line
from tests.cli.fake_api import Fault, row_of

COMMANDS = ["resume", "status", "results", "cancel"]


def submitted(shell: Shell, *custom_ids: str, **last: object) -> str:
    """Return the id of a batch that was just made."""
    *others, end = custom_ids or ("a",)
    lines = [*(line(custom_id) for custom_id in others), line(end, **last)]
    return shell.type("submit", shell.file(*lines)).out.strip()


def test_a_batch_is_waited_for_and_fetched(shell: Shell) -> None:
    """Under its id unless told; looks become rarer, from a second to ten."""
    batch_id = submitted(shell, "a", "b")
    said = shell.type("resume", batch_id)
    assert said.status == 0
    rows = row_of(line("a")) + row_of(line("b"))
    assert Path(f"{batch_id}.output.jsonl").read_bytes() == rows
    assert not Path(f"{batch_id}.errors.jsonl").exists()
    assert shell.pauses == [1.0]


def test_looks_become_rarer() -> None:
    """From one second to ten, and never more."""
    from cli.batches.follow import poll_delays

    delays = poll_delays()
    found = [next(delays) for _ in range(20)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[-1] == 10.0


def test_a_server_that_is_away_for_minutes_is_waited_for(shell: Shell) -> None:
    """A batch of hours is not left because of them."""
    batch_id = submitted(shell)
    shell.api.advance(shell.api.batches[batch_id])

    def go_away(method: str, path: str) -> None:
        if (method, path) == ("GET", f"/v1/batches/{batch_id}"):
            shell.api.seen = lambda *_: None
            shell.api.faults = [Fault("GET", "/v1/batches/", status=500, times=30)]

    shell.api.batches[batch_id]["status"] = "validating"
    shell.api.seen = go_away
    assert shell.type("resume", batch_id).status == 0
    assert sum(shell.pauses) > 120


def test_a_download_goes_on_where_it_broke(shell: Shell) -> None:
    """Twice in a row here; what is there is not fetched again."""
    batch_id = submitted(shell, *(str(number) for number in range(50)))
    shell.api.faults = [
        Fault("GET", "/storage/file/", after_bytes=1_000),
        Fault("GET", "/storage/file/", after_bytes=500),
        Fault("GET", "/storage/file/", status=503),
    ]
    assert shell.type("resume", batch_id, "-o", "rows").status == 0
    assert Path("rows").read_bytes() == b"".join(row_of(line(str(n))) for n in range(50))
    assert shell.api.count("GET", "/storage/file/") == 4


def test_a_download_that_was_given_up_goes_on_at_the_next_command(shell: Shell) -> None:
    """The name appears only when all is there."""
    batch_id = submitted(shell, *(str(number) for number in range(50)))
    shell.api.faults = [
        Fault("GET", "/storage/file/", after_bytes=1_000),
        Fault("GET", "/storage/file/", status=404),
    ]
    said = shell.type("resume", batch_id, "-o", "rows")
    assert said.status == 1
    assert "the storage does not give the results: HTTP 404" in said.err
    assert f"`tidemill resume {batch_id} -o rows" in said.err
    assert not Path("rows").exists()
    said = shell.type("results", batch_id, "-o", "rows")
    assert said.status == 0
    assert "at byte 1,000" in said.err
    assert Path("rows").read_bytes() == b"".join(row_of(line(str(n))) for n in range(50))
    assert [path.name for path in shell.folder.glob(".*")] == []


def test_ctrl_c_leaves_the_batch_running(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit status is a signal's, and the command that goes on is said."""
    file = shell.file(line("a b"))
    monkeypatch.setattr("cli.api.patience.pause", lambda _: os.kill(os.getpid(), 2))
    assert main(["submit", file, "--wait", "-o", "my rows"]) == 130
    said = capfd.readouterr()
    [batch_id] = shell.api.batches
    assert said.out == f"{batch_id}\n"
    assert f"`tidemill resume {batch_id} -o 'my rows' -e" in said.err
    assert shell.api.count("POST", "/cancel") == 0


def test_results_of_a_batch_that_runs_are_not_there_yet(shell: Shell) -> None:
    """It says how to wait, and how to see rows before the end."""
    said = shell.type("results", submitted(shell))
    assert said.status == 1
    assert "`tidemill resume" in said.err
    assert "--follow" in said.err


def test_results_can_be_printed(shell: Shell) -> None:
    """The good rows alone; the others are told of."""
    batch_id = submitted(shell, "a", "b", fail=True)
    shell.type("resume", batch_id)
    said = shell.type("results", batch_id, "-o", "-")
    assert said.status == 3
    assert said.out.encode() == row_of(line("a"))
    assert "1 row failed: -e FILE fetches them" in said.err


def test_rows_are_printed_as_they_come(shell: Shell) -> None:
    """Each once, also those that were finished behind a gap."""
    batch_id = submitted(shell, *"abcdefg")
    said = shell.type("results", batch_id, "--follow")
    assert said.status == 0
    assert [value["line"] for value in said.values] == [1, 3, 5, 7, 2, 4, 6]
    assert {value["custom_id"] for value in said.values} == set("abcdefg")


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

    monkeypatch.setattr("cli.api.patience.pause", stop)
    assert shell.type("status", "--watch").status == 130


def test_a_batch_is_cancelled(shell: Shell) -> None:
    """At once, or when it has ended; as that was asked for, it is a success."""
    said = shell.type("cancel", submitted(shell))
    assert said.status == 0
    assert "is cancelling" in said.err
    said = shell.type("cancel", submitted(shell), "--wait", "--json")
    assert said.status == 0
    assert said.values[-1]["status"] == "cancelled"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_that_is_not_there_is_named(shell: Shell, command: str) -> None:
    """In the server's words."""
    said = shell.type(command, "batch_none/../x")
    assert (said.status, said.out) == (1, "")
    assert "There is no" in said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_key_is_said_to_be_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With the variable that holds it, and never the key itself."""
    monkeypatch.setenv("TIDEMILL_API_KEY", "tm_wrong")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (8, "")
    assert "does not accept the key in TIDEMILL_API_KEY (HTTP 403 Forbidden)" in said.err
    assert "tm_wrong" not in said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_server_that_is_not_there_is_tried_a_few_times(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """With longer and longer pauses."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (7, "")
    assert "http://127.0.0.1:9 cannot be reached" in said.err
    assert shell.pauses == [0.5, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("variable", ["TIDEMILL_BASE_URL", "TIDEMILL_API_KEY"])
def test_a_variable_that_is_missing_is_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, variable: str, command: str
) -> None:
    """OpenAI's own are not read in its place: that would send a file to somebody else."""
    monkeypatch.delenv(variable)
    monkeypatch.setenv("OPENAI_BASE_URL", shell.api.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    said = shell.type(command, "batch_1")
    assert (said.status, said.out) == (2, "")
    assert f"set {variable}" in said.err
    assert shell.api.requests == []


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_written_as_people_do(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """With and without the version and a slash."""
    monkeypatch.setenv("TIDEMILL_BASE_URL", "http://127.0.0.1:9")
    assert shell.type("status", "--base-url", f"{shell.api.url}{suffix}").status == 0
    assert shell.api.requests == [("GET", "/v1/batches")]


def test_what_the_server_asks_to_wait_is_waited(shell: Shell) -> None:
    """Whatever the backoff would be."""
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "7"}),
        Fault("GET", "/v1/batches", status=503, headers={"Retry-After": "3"}),
    ]
    assert shell.type("status").status == 0
    assert shell.pauses == [7.0, 3.0]


def test_nobody_waits_for_a_day(shell: Shell) -> None:
    """A limit of the day is said, with the time after which it ends."""
    words = b'{"error": {"message": "1,000 requests a day.", "code": "requests_per_day"}}'
    shell.api.faults = [
        Fault("GET", "/v1/batches", status=429, headers={"Retry-After": "36000"}, body=words)
    ]
    said = shell.type("status")
    assert said.status == 7
    assert "1,000 requests a day; it asks to come back in 10 h 0 min" in said.err
    assert shell.pauses == []


@pytest.mark.parametrize("body", [b"<html>Hello</html>", b"[]", b"{}", b'{"data": 5}'])
def test_a_server_of_another_kind_is_told_apart(shell: Shell, body: bytes) -> None:
    """Whatever it answers."""
    shell.api.faults = [Fault("GET", "/v1/batches", status=200, body=body)]
    said = shell.type("status")
    assert (said.status, said.out) == (1, "")
    assert "not as Tidemill's API does: is TIDEMILL_BASE_URL or --base-url right?" in said.err


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: folder.joinpath("rows").mkdir(), "rows is a directory"),
        (lambda folder: folder.joinpath("rows").write_text(""), "rows is there already"),
        (lambda folder: os.mkfifo(folder / "rows"), "rows is no ordinary file"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_the_wait(
    shell: Shell, spoil: Callable[[Path], object], words: str
) -> None:
    """Exit status 2."""
    batch_id = submitted(shell)
    spoil(shell.folder)
    said = shell.type("resume", batch_id, "-o", "rows")
    assert said.status == 2
    assert words in said.err
    assert shell.api.batches[batch_id]["status"] == "in_progress"


def test_a_full_disk_is_a_sentence(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do; the rows are still on the server."""
    batch_id = submitted(shell)

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cli.batches.fetch.os.fsync", fill)
    said = shell.type("resume", batch_id, "-o", "rows")
    assert said.status == 1
    assert "the disk of rows is full: make room, then give the same command" in said.err
    assert not Path("rows").exists()
