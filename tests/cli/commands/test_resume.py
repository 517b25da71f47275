"""`tidemill resume`: a batch that was made before is waited for, and its rows are fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.api_rig import Shell, line, submitted
from tests.cli.fake_api import Fault, row_of


def test_a_batch_is_waited_for_and_fetched(shell: Shell) -> None:
    """The files are named by the ID; the polling interval grows from one to ten seconds."""
    batch_id = submitted(shell, "a", "b")
    result = shell.type("resume", batch_id)
    assert result.status == 0
    rows = row_of(line("a")) + row_of(line("b"))
    assert Path(f"{batch_id}.output.jsonl").read_bytes() == rows
    assert not Path(f"{batch_id}.errors.jsonl").exists()
    assert shell.pauses == [1.0]


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
    result = shell.type("resume", batch_id, "-o", "rows")
    assert result.status == 1
    assert "the results cannot be downloaded: storage returned HTTP 404" in result.err
    assert f"{batch_id} has ended; to fetch its rows: `tidemill resume {batch_id} -o" in result.err
    assert not Path("rows").exists()
    result = shell.type("results", batch_id, "-o", "rows")
    assert result.status == 0
    assert "at byte 1,000" in result.err
    assert Path("rows").read_bytes() == b"".join(row_of(line(str(n))) for n in range(50))
    assert [path.name for path in shell.folder.glob(".*")] == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: folder.joinpath("rows").mkdir(), "rows is a directory"),
        (lambda folder: folder.joinpath("rows").write_text(""), "rows already exists"),
        (lambda folder: os.mkfifo(folder / "rows"), "rows is not a regular file"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused_before_the_wait(
    shell: Shell, spoil: Callable[[Path], object], words: str
) -> None:
    """The exit status is 2."""
    batch_id = submitted(shell)
    spoil(shell.folder)
    result = shell.type("resume", batch_id, "-o", "rows")
    assert result.status == 2
    assert words in result.err
    assert shell.api.batches[batch_id]["status"] == "in_progress"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-o", "x.csv", "-e", "errors"), "contains the errors of failed rows: remove -e"),
        (("-o", "x.tsv"), "has no table, only rows: pass -o a .jsonl, .csv or .parquet file name"),
    ],
)
def test_tables_that_rows_cannot_be_written_to_are_refused_before_the_wait(
    shell: Shell, flags: tuple[str, ...], words: str
) -> None:
    """A batch whose input is not a table gets one only as CSV or Parquet."""
    batch_id = submitted(shell)
    result = shell.type("resume", batch_id, *flags)
    assert (result.status, words in result.err) == (2, True)
    assert shell.api.batches[batch_id]["status"] == "in_progress"


def test_a_full_disk_is_a_sentence(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has advice; the rows are still on the server."""
    batch_id = submitted(shell)

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tidemill.cli.transfer.download.os.fsync", fill)
    result = shell.type("resume", batch_id, "-o", "rows")
    assert result.status == 1
    assert (
        "the disk of rows is full: free some space, then run the same command again" in result.err
    )
    assert not Path("rows").exists()
